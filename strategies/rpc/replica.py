"""A worker's replica of a module, and the remote calls by which the master uses it."""

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from strategies.base import stages
from strategies.base.gradients import parameters_of
from strategies.rpc import agents
from strategies.rpc.queues import MainThreadQueue


class Replica:
    """A module's `forward`: in stages on `devices`, or, without any, whole and where it is."""

    def __init__(self, module: LightningModule, devices: Sequence[torch.device] | None = None) -> None:
        self.module = module
        groups = [] if devices is None else cut(module, len(devices))
        self._stages = list(zip(devices or [], groups, strict=True))
        for device, group in self._stages:
            for part in group:
                part.to(device)

    def __call__(self, *inputs: Tensor) -> Any:
        """The module's output."""
        if not self._stages:
            return type(self.module).forward(self.module, *inputs)
        x: Any = inputs
        for device, group in self._stages:
            x = stages.chained(group, tree_map(lambda t, to=device: t.to(to) if isinstance(t, Tensor) else t, x))
        return x


def cut(module: LightningModule, count: int) -> list[list[nn.Module]]:
    """The modules of each of `count` stages, with about as many parameters each; ValueError where that can't be."""
    name = type(module).__name__
    if not callable(getattr(module, "pipeline_stages", None)):
        raise ValueError(f"devices_per_worker {count}: expected a module with pipeline_stages; {name} has none")
    modules: list[nn.Module] = list(module.pipeline_stages())  # type: ignore[operator]
    if len(modules) < count:
        raise ValueError(f"devices_per_worker {count}: expected at most the {len(modules)} stages of {name}")
    groups = stages.grouped(modules, stages.sizes_by_parameters(modules, count))
    stages.check(module, groups)
    return groups


class Worker:
    """The object on each worker to which the master holds a remote reference; no optimizer if nothing is trained."""

    def __init__(self, calls: MainThreadQueue, optimizer: Optimizer | None = None) -> None:
        self.calls, self.optimizer = calls, optimizer

    def forward(self, *inputs: Tensor) -> tuple[Any, str]:
        """The replica's output for some rows, on the CPU, and ""; or None and the error."""
        try:
            output = self.calls.call("forward", *inputs)
        except Exception as error:  # noqa: BLE001 - it is raised on both sides, here by the main thread
            return None, f"{type(error).__name__}: {error}"
        return tree_map(lambda leaf: _sendable(leaf) if isinstance(leaf, Tensor) else leaf, output), ""

    def parameters(self) -> list[Any]:
        """Remote references to the trained parameters."""
        return [rpc.RRef(p) for p in (parameters_of(self.optimizer) if self.optimizer else [])]


def _sendable(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; an empty view is copied, as its offset would abort the receiver."""
    return (tensor if tensor.numel() else tensor.clone()).cpu()


_local: list[Worker] = []  # this process's, if any: a remote call reaches a process, not an object


def set_local_worker(worker: Worker | None) -> None:
    """Make `worker` this process's own; None: it has none."""
    _local[:] = [] if worker is None else [worker]


def local_worker() -> Worker:
    """This process's worker."""
    return _local[0]


# The master's calls


def call(method: Callable[..., Any], worker: Any, *args: Any) -> Any:
    """A future of a method's result, called on a remote reference's owner.

    `worker.rpc_async()` would first ask for the worker's type, and make the first call outside the thread whose
    distributed autograd context records it: its gradients are silently lost (torch 2.15).
    """
    return rpc.rpc_async(worker.owner(), _call_local, args=(method, worker, *args))


def _call_local(method: Callable[..., Any], worker: Any, *args: Any) -> Any:
    return method(worker.local_value(), *args)


def load_distributed_optimizer() -> Any:
    """The class of torch: imported late, as that is slow, and without hints and warnings about torch's own parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import DistributedOptimizer
    logging.getLogger(DistributedOptimizer.__module__).addFilter(_is_no_hint)
    return DistributedOptimizer


def _is_no_hint(record: logging.LogRecord) -> bool:
    """Whether a record is not the hint that `LocalOptimizer` has no functional form."""
    return record.args != (LocalOptimizer,)


def distributed_optimizer(workers: Sequence[Any]) -> Any:
    """A DistributedOptimizer over the workers' optimizers."""
    calls = [call(Worker.parameters, worker) for worker in workers]
    parameters = [p for rank, future in enumerate(calls, 1) for p in agents.wait(future, rank)]
    return load_distributed_optimizer()(LocalOptimizer, parameters)


class LocalOptimizer:
    """The optimizer class for DistributedOptimizer: it steps the worker's own, with its groups and learning rates."""

    def __init__(self, parameters: Sequence[Tensor]) -> None: ...

    def step(self) -> None:
        """Step in the main thread."""
        local_worker().calls.call("step")
