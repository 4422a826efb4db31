"""Remote calls, which arrive in RPC threads and wait for the main thread."""

import queue
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from strategies.rpc import agents

PING_INTERVAL = 1.0  # seconds


class CallQueue:
    """Calls with futures of their results; `timeout` is in seconds."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._calls: queue.SimpleQueue[tuple[Any, Future]] = queue.SimpleQueue()

    def put(self, call: Any) -> Future:
        """Add a call, in an RPC thread."""
        result: Future = Future()
        self._calls.put((call, result))
        return result

    def get(self, callers: Iterable[int]) -> tuple[Any, Future]:
        """Wait for the next call; RuntimeError if a rank that should call has gone, or is too late."""
        deadline, pings = time.monotonic() + self.timeout, dict[int, Future]()
        while True:
            with suppress(queue.Empty):
                return self._calls.get(timeout=PING_INTERVAL)
            for rank in callers:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"Timed out: nothing from rank {rank}")
                if rank in pings and pings[rank].done():
                    agents.wait(pings.pop(rank), rank)
                if rank not in pings:
                    pings[rank] = rpc.rpc_async(agents.worker_name(rank), torch.is_grad_enabled)


class MainThreadQueue(CallQueue):
    """Rank zero's calls, executed in the main thread.

    Autocast, keyed noise and gradient mode belong to the thread in which Lightning calls a hook.
    """

    def call(self, name: str, *args: Any) -> Any:
        """The main thread's result for these arguments; called in an RPC thread."""
        return self.put((name, args)).wait()

    def serve(self, name: str, function: Callable[..., Any]) -> None:
        """Execute the next call, which has to have this name; called in the main thread."""
        (called, args), result = self.get([0])
        assert called == name, f"asked to {called}, where all others {name}"
        try:
            result.set_result(function(*args))
        except Exception as error:
            result.set_exception(error)
            raise


class Push(NamedTuple):
    """A worker's packed gradients of a step, for parameters that had `version` updates."""

    rank: int
    step: int
    version: int
    gradients: Tensor


class GradientQueue(CallQueue):
    """Gradients that workers, ranks from 0 on, push to a parameter server; the reply is the step's parameters."""

    def __init__(self, workers: int, timeout: float) -> None:
        super().__init__(timeout)
        self.workers = workers
        self._pushes: dict[int, dict[int, tuple[Push, Future]]] = defaultdict(dict)

    def take(self, step: int) -> list[Push]:
        """Wait for all pushes of a step; in the order of the ranks."""
        while missing := set(range(self.workers)) - self._pushes[step].keys():
            push, reply = self.get(sorted(missing))
            self._pushes[push.step][push.rank] = push, reply  # a fast worker's next step comes early
        return [push for _, (push, _) in sorted(self._pushes[step].items())]

    def reply(self, step: int, parameters: Tensor) -> None:
        """Send the parameters after a step to all who have pushed for it."""
        for _, reply in self._pushes.pop(step).values():
            reply.set_result(parameters)


_served: list[GradientQueue] = []  # this process's, if any: a remote call reaches a process, not an object


def serve(gradients: GradientQueue | None) -> None:
    """Put pushes to this process into a queue from now on; None: accept no more."""
    _served[:] = [] if gradients is None else [gradients]


@async_execution
def push(gradients: Push) -> Future:
    """Remote call: put gradients into the queue of the process that it runs in."""
    return _served[0].put(gradients)
