"""The object on each worker to which a master holds a remote reference, and the remote calls of its methods."""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed import rpc
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from strategies.base.gradients import parameters_of
from strategies.rpc.agents import CallQueue, receiver, wait


class Worker(CallQueue):
    """Executes the master's calls in its main thread.

    Autocast, keyed noise and gradient mode belong to the thread in which Lightning calls a hook.

    Args:
        timeout: seconds to wait for a call.
        optimizer: steps the trained parameters, if there are any.
    """

    def __init__(self, timeout: float, optimizer: Optimizer | None) -> None:
        super().__init__(timeout)
        self.optimizer = optimizer

    def forward(self, *inputs: Tensor) -> tuple[Any, str]:
        """The module's output for some rows, on the CPU, and ""; or None and the error."""
        try:
            output = self.put(("forward", inputs)).wait()
        except Exception as error:  # noqa: BLE001 - it is raised on both sides, here by the main thread
            return None, f"{type(error).__name__}: {error}"
        # An empty view is copied, as its offset would abort the receiver.
        return tree_map_only(Tensor, lambda x: (x if x.numel() else x.clone()).cpu(), output), ""

    def parameters(self) -> list[Any]:
        """Remote references to the trained parameters."""
        return [rpc.RRef(p) for p in (parameters_of(self.optimizer) if self.optimizer else [])]

    def serve(self, name: str, function: Callable[..., Any]) -> None:
        """Execute the next call, which has to have this name; called in the main thread."""
        (called, args), result = self.get([0])
        assert called == name, f"asked to {called}, where all others {name}"
        try:
            result.set_result(function(*args))
        except Exception as error:
            result.set_exception(error)
            raise


class LocalOptimizer:
    """The optimizer class for DistributedOptimizer: it steps the worker's own, with its groups and learning rates."""

    def __init__(self, parameters: Sequence[Tensor]) -> None: ...

    def step(self) -> None:
        """Step in the main thread."""
        receiver().put(("step", ())).wait()


# The master's calls


def call(method: Callable[..., Any], worker: Any, *args: Any) -> Any:
    """A future of a method's result, called on a remote reference's owner.

    `worker.rpc_async()` would first ask for the worker's type, and make the first call outside the thread whose
    distributed autograd context records it: its gradients are silently lost (torch 2.15).
    """
    return rpc.rpc_async(worker.owner(), _call_local, args=(method, worker, *args))


def _call_local(method: Callable[..., Any], worker: Any, *args: Any) -> Any:
    return method(worker.local_value(), *args)


@cache
def load_distributed_optimizer() -> Any:
    """The class of torch: imported late, as that is slow, and without hints and warnings about torch's own parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import DistributedOptimizer
    # Without the hint that LocalOptimizer has no functional form.
    logging.getLogger(DistributedOptimizer.__module__).addFilter(lambda record: record.args != (LocalOptimizer,))
    return DistributedOptimizer


def distributed_optimizer(workers: Sequence[Any]) -> Any:
    """A DistributedOptimizer over the workers' optimizers."""
    calls = [call(Worker.parameters, worker) for worker in workers]
    parameters = [p for rank, future in enumerate(calls, 1) for p in wait(future, rank)]
    return load_distributed_optimizer()(LocalOptimizer, parameters)
