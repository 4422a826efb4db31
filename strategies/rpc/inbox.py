"""Where gradients arrive at a parameter server, and wait until its main thread asks for them."""

import threading
from typing import NamedTuple

from torch import Tensor
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from strategies.rpc import agents


class Push(NamedTuple):
    """A worker's gradient.

    Attributes:
        rank: the worker's.
        step: number of the step.
        version: of the parameters that it was computed with: the number of updates they had.
        gradients: packed.
    """

    rank: int
    step: int
    version: int
    gradients: Tensor


class Inbox:
    """The gradients of each step; who sends one is answered with the parameters after that step.

    Args:
        workers: how many send one for every step, ranks from 0 on.
        timeout: seconds they may take.
    """

    def __init__(self, workers: int, timeout: float) -> None:
        self.workers, self.timeout = workers, timeout
        self._arrived = threading.Condition()
        self._pushes: dict[int, dict[int, Push]] = {}
        self._replies: dict[int, list[Future]] = {}

    def put(self, push: Push) -> Future:
        """Keep a gradient; in the thread that received it."""
        reply: Future = Future()
        with self._arrived:
            self._pushes.setdefault(push.step, {})[push.rank] = push
            self._replies.setdefault(push.step, []).append(reply)
            self._arrived.notify()
        return reply

    def take(self, step: int) -> list[Push]:
        """The gradients of a step in the order of the ranks, as soon as all are there.

        Raises:
            RuntimeError: a worker has gone, or is too late.
        """
        watch = agents.Watch(self.timeout)
        with self._arrived:
            while missing := self._missing(step):
                if not self._arrived.wait(agents.ROUND):
                    watch.look(missing)
            return [push for _, push in sorted(self._pushes.pop(step).items())]

    def _missing(self, step: int) -> list[int]:
        return [rank for rank in range(self.workers) if rank not in self._pushes.get(step, {})]

    def answer(self, step: int, parameters: Tensor) -> None:
        """Send the parameters after a step to all who wait for it."""
        with self._arrived:
            replies = self._replies.pop(step)
        for reply in replies:
            reply.set_result(parameters)


_open: Inbox | None = None


def opened(inbox: Inbox | None) -> None:
    """Receive in this process from now on with `inbox`; None: no longer."""
    global _open  # noqa: PLW0603 - calls from elsewhere reach a process, not an object
    _open = inbox


@async_execution
def put(push: Push) -> Future:
    """`Inbox.put` of the process in which it is called."""
    assert _open is not None
    return _open.put(push)
