"""A replica of a module on a worker, and what a master asks of it by remote references."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed import rpc
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from strategies.base import stages
from strategies.rpc.main_thread import MainThreadQueue


class Replica:
    """A module's `forward`, on one device or in stages on several.

    Args:
        module: what is computed.
        devices: of the stages; None: the module stays whole, where it is.

    Raises:
        ValueError: it can't be cut so.
    """

    def __init__(self, module: LightningModule, devices: Sequence[torch.device] | None = None) -> None:
        self.module = module
        self._stages: list[tuple[torch.device, list[nn.Module]]] = []
        if devices is not None:
            groups = cut(module, len(devices))
            self._stages = list(zip(devices, groups, strict=True))
            for device, group in self._stages:
                for part in group:
                    part.to(device)

    def __call__(self, *inputs: Tensor) -> Any:
        """What the module makes of inputs, rows first."""
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
    sizes = stages.sizes_by_cost([sum(p.numel() for p in m.parameters()) for m in modules], count)
    groups = stages.grouped(modules, sizes)
    stages.check(module, groups)
    return groups


class Worker:
    """What a master holds a remote reference to, one on each worker.

    Args:
        desk: where the worker's main thread attends to calls.
        optimizer: the worker's own; None where nothing is trained.
    """

    def __init__(self, desk: MainThreadQueue, optimizer: Optimizer | None = None) -> None:
        self.desk, self.optimizer = desk, optimizer

    def forward(self, *inputs: Tensor) -> tuple[Any, str]:
        """What the replica makes of some rows, on the CPU; or, in words, how it failed."""
        try:
            output = self.desk.call("forward", *inputs)
        except Exception as error:  # noqa: BLE001 - it is raised on both sides, here by the main thread
            return None, f"{type(error).__name__}: {error}"
        return tree_map(lambda leaf: _sendable(leaf) if isinstance(leaf, Tensor) else leaf, output), ""

    def parameters(self) -> list[Any]:
        """Remote references to what is trained."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [rpc.RRef(p) for group in groups for p in group["params"]]


def _sendable(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; a view of no rows as a tensor of its own, as its offset would abort who receives it."""
    return (tensor if tensor.numel() else tensor.clone()).cpu()


def call(method: Callable[..., Any], worker: Any, *args: Any) -> Any:
    """A future of what a method of a worker gives, called where the worker is.

    `worker.rpc_async()` would ask for the worker's type first, and make the first call outside of the thread whose
    distributed autograd is to know of it: it loses its gradients without a word (torch 2.15).
    """
    return rpc.rpc_async(worker.owner(), _called, args=(method, worker, *args))


def _called(method: Callable[..., Any], worker: Any, *args: Any) -> Any:
    return method(worker.local_value(), *args)


_employed: Worker | None = None


def employ(worker: Worker | None) -> None:
    """Have `worker` work in this process from now on; None: no longer."""
    global _employed  # noqa: PLW0603 - calls from elsewhere reach a process, not an object
    _employed = worker


def employed() -> Worker:
    """This process's worker."""
    assert _employed is not None
    return _employed


class LocalStep:
    """What DistributedOptimizer takes for the optimizer of a worker: the step of the one that Lightning has there.

    torch's would make optimizers of its own, which have neither parameter groups nor learning-rate schedules.

    Args:
        parameters: those whose gradients are in the context of distributed autograd; of no interest here.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        """Have the main thread step."""
        employed().desk.call("step")
