"""Isolates what is computed of a shard or an evaluation batch: its random numbers, and no collectives in it.

Random numbers depend on the seed and on what is computed, whichever rank computes it. Ranks compute different numbers
of shards, and would wait for ever in a collective of a module's steps.
"""

import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torchmetrics import Metric

from apprentice import keyed
from apprentice.contract import ModuleLayout
from apprentice.errors import BadInput
from strategies.base.data_parallel import DataParallel

OF_STRATEGY = ("all_gather", "barrier", "broadcast", "reduce", "reduce_boolean_decision")
# Functions of torch.distributed, and the methods of ProcessGroup that they call.
COLLECTIVE = re.compile(
    "_?(all_?(gather|reduce|to)|(monitored_)?barrier|batch_isend|broadcast|gather|i?(send|recv)|reduce($|_s)|scatter)"
)

SPARE = np.random.MT19937(0)  # numpy's inside `seed_generators`: copying its usual generator's state takes longer
SYNC_CONTEXT = Metric.sync_context
# Inside a module's step, from a collective's name to the error that it raises.
_refusal: ContextVar[Callable[[str], BadInput] | None] = ContextVar("refusal", default=None)


@contextmanager
def seed_generators(device: torch.device, layout: ModuleLayout, *numbers: int) -> Iterator[None]:
    """Seed torch, numpy and Python with the run's seed and these numbers; restore their states afterwards."""
    key = keyed.fold_in(layout.seed or int(os.environ.get("PL_GLOBAL_SEED", "0")), *numbers)
    cuda = device.type == "cuda"
    python_state, numpy_generator = random.getstate(), get_bit_generator()
    set_bit_generator(SPARE)
    try:
        with torch.random.fork_rng([device] if cuda else []):
            torch.default_generator.manual_seed(key)
            if cuda:  # torch.manual_seed would note a call stack for an unused GPU
                torch.cuda.manual_seed(key)
            np.random.seed(key)  # noqa: NPY002 - others' modules draw from it
            random.seed(key)
            yield
    finally:
        set_bit_generator(numpy_generator)
        random.setstate(python_state)


@contextmanager
def refuse_collectives(step: str, strategy: DataParallel) -> Iterator[None]:
    """Inside, in the module's method `step`, collectives and a metric's `compute()` raise BadInput.

    A metric's `forward` is allowed: it computes the value of its own rows.
    """

    def refusal(call: str) -> BadInput:
        why = "as ranks compute different numbers of shards and batches"
        return strategy._fault(f"a {step} without collectives, {why}; it calls {call}", step)

    token = _refusal.set(refusal)
    for name in OF_STRATEGY:
        setattr(strategy, name, _guard(getattr(strategy, name), f"trainer.strategy.{name}"))
    for owner, name, _, guarded in _patches():
        setattr(owner, name, guarded)
    try:
        yield
    finally:
        for owner, name, original, _ in _patches():
            setattr(owner, name, original)
        for name in OF_STRATEGY:
            delattr(strategy, name)
        _refusal.reset(token)


@contextmanager
def allow_collectives() -> Iterator[None]:
    """Inside, collectives are allowed again, such as those of a strategy that computes the module's `forward`."""
    token = _refusal.set(None)
    try:
        yield
    finally:
        _refusal.reset(token)


@cache  # each shard needs it
def _patches() -> list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]]:
    """Owner, name, original and replacement of each function."""
    patches = [
        (owner, name, original, _guard(getattr(owner, name), f"{label}.{name}"))
        for label, owner in {"torch.distributed": dist, "ProcessGroup": dist.ProcessGroup}.items()
        for name, original in vars(owner).items()
        if COLLECTIVE.match(name) and callable(original)
    ]
    return [*patches, (Metric, "sync_context", SYNC_CONTEXT, _guard_sync_context)]


def _guard(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if (refusal := _refusal.get()) is not None:
            raise refusal(name)
        return call(*args, **kwargs)

    return guarded


def _guard_sync_context(metric: Metric, *args: Any, **kwargs: Any) -> Any:
    syncs = kwargs.get("should_sync", True) or kwargs.get("should_unsync", True)  # `forward` asks for neither
    call = _guard(SYNC_CONTEXT, f"{type(metric).__name__}.compute()") if syncs else SYNC_CONTEXT
    return call(metric, *args, **kwargs)
