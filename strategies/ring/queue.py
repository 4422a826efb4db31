"""Collectives that run one after the other, in the order of their calls, in a thread beside the one that called."""

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

NO_TIMEOUT = timedelta(0)


class Collective(dist.Work):
    """One that was called, as torch hands it to the caller.

    Args:
        name: of the call.
        run: does it.
        tensors: where its result will be.
    """

    def __init__(self, name: str, run: Callable[[], None], tensors: list[Tensor]) -> None:
        super().__init__()
        self._name, self._run, self._tensors = name, run, tensors
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._end: Future[None] = Future()
        # An error that is raised here reaches DDP's reducer as one; `set_exception` reaches only Python.
        self._future = self._end.then(self._outcome)

    def run(self) -> None:
        """Do it, and wake those who wait for it."""
        try:
            with torch.inference_mode():  # takes tensors of inference, too, and keeps no graph
                self._run()
        except Exception as error:  # noqa: BLE001 - it is raised where the collective is waited for
            self._error = error
        self._run = _nothing  # lets go of what it was called with
        self._ended.set()
        self._end.set_result(None)

    def _outcome(self, _end: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    # torch's names

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return when it is done; raise what it raised."""
        seconds = timeout.total_seconds() or None
        if not self._ended.wait(seconds):
            raise RuntimeError(f"Timed out waiting {1000 * (seconds or 0):.0f}ms for {self._name} to complete")
        self._outcome(None)
        return True

    def get_future(self) -> Future:
        """A future of its tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """What it raised."""
        return self._error

    def result(self) -> list[Tensor]:
        """Its tensors."""
        return self._tensors


class Queue:
    """A thread that runs collectives; it ends when the queue is closed or no longer used."""

    def __init__(self) -> None:
        self._lines = _Lines()
        self._thread = threading.Thread(target=self._lines.work_off, name="ring", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, self._lines.waiting.put, None)

    def add(self, collective: Collective, at_once: bool) -> Collective:
        """Have it run when those before it have ended.

        Args:
            collective: to be run.
            at_once: whether its caller waits for it: it is run here, if none is before it, which spares two changes of
                threads.
        """
        if threading.current_thread() is self._thread:  # called in what follows on another one
            collective.run()
            return collective
        with self._lines.lock:
            if at_once and not self._lines.unfinished:
                collective.run()
            else:
                self._lines.unfinished += 1
                self._lines.waiting.put(collective)
        return collective


class _Lines:
    """What the thread shares with those who call, and does not keep the queue alive by."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[Collective | None] = SimpleQueue()
        self.lock = threading.RLock()
        self.unfinished = 0

    def work_off(self) -> None:
        """Run what comes, in order."""
        while (collective := self.waiting.get()) is not None:
            collective.run()
            del collective  # else it would be kept until the next one comes
            with self.lock:
                self.unfinished -= 1


def _nothing() -> None: ...
