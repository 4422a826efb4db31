"""Refuses collectives in a module's steps, where ranks compute different numbers of them and would wait for ever."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torchmetrics import Metric

OF_STRATEGY = ("all_gather", "barrier", "broadcast", "reduce", "reduce_boolean_decision")
OF_TORCH = (
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv"),
    *("broadcast", "broadcast_object_list", "gather", "gather_into_tensor", "gather_object", "gather_single"),
    *("irecv", "isend", "monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list"),
)
# What these functions end in, for code that has them under other names.
OF_GROUPS = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single", "allgather"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall"),
    *("alltoall_base", "barrier", "broadcast", "gather", "gather_into_tensor", "gather_single", "monitored_barrier"),
    *("recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "scatter", "send"),
)

_step: ContextVar[str | None] = ContextVar("step", default=None)


@contextmanager
def refused(step: str, strategy: Strategy) -> Iterator[None]:
    """Inside, each collective raises ValueError: of the strategy, of torch.distributed, and a metric's `compute()`.

    A metric's `forward` is let through, as it computes the value of its own rows alone.

    Args:
        step: the module's method that is called inside, which the message names.
        strategy: the one in use.
    """
    token = _step.set(step)
    for name in OF_STRATEGY:
        setattr(strategy, name, _checked(getattr(strategy, name), f"trainer.strategy.{name}"))
    for owner, name, _, checked in _global():
        setattr(owner, name, checked)
    try:
        yield
    finally:
        for owner, name, original, _ in _global():
            setattr(owner, name, original)
        for name in OF_STRATEGY:
            delattr(strategy, name)
        _step.reset(token)


@contextmanager
def allowed() -> Iterator[None]:
    """Inside, collectives are let through again: those of a strategy that computes what the step has asked for."""
    token = _step.set(None)
    try:
        yield
    finally:
        _step.reset(token)


@cache
def _global() -> list[tuple[Any, str, Callable, Callable]]:
    """Owner, name, what is there (as it is stored) and what takes its place; made once: each shard wants it."""
    groups = getattr(dist, "ProcessGroup", None)
    names = [("torch.distributed", dist, name) for name in OF_TORCH] + [("ProcessGroup", groups, n) for n in OF_GROUPS]
    replaced = [
        (owner, name, vars(owner)[name], _checked(getattr(owner, name), f"{label}.{name}"))
        for label, owner, name in names
        if hasattr(owner, name)  # some are newer than others
    ]
    return [*replaced, (Metric, "sync_context", Metric.sync_context, _checked_metric(Metric.sync_context))]


def _checked(call: Callable, name: str) -> Callable:
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check(name)
        return call(*args, **kwargs)

    return checked


def _checked_metric(sync_context: Callable) -> Callable:
    def checked(metric: Metric, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("should_sync", True) or kwargs.get("should_unsync", True):  # `forward` asks for neither
            _check(f"{type(metric).__name__}.compute()")
        return sync_context(metric, *args, **kwargs)

    return checked


def _check(call: str) -> None:
    if (step := _step.get()) is not None:
        why = "as ranks compute different numbers of shards and batches"
        raise ValueError(f"--exact: expected a {step} without collectives, {why}; it calls {call}")
