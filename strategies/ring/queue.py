"""Collectives that run in the order of their calls, in a thread beside the caller."""

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
    """A collective that was called, as torch returns it to the caller; `run` computes `tensors`."""

    def __init__(self, name: str, run: Callable[[], None], tensors: list[Tensor]) -> None:
        super().__init__()
        self._name, self._tensors = name, tensors
        self._run: Callable[[], None] | None = run
        self._done = threading.Event()
        self._error: Exception | None = None
        self._end: Future[None] = Future()
        # An error raised in a callback reaches DDP's reducer; `set_exception` reaches only Python.
        self._future = self._end.then(lambda _: self.result())

    def run(self) -> None:
        """Execute it, and wake those who wait for it."""
        assert self._run is not None
        try:
            with torch.inference_mode():  # accepts inference tensors, too, and keeps no graph
                self._run()
        except Exception as error:  # noqa: BLE001 - raised where the collective is waited for
            self._error = error
        self._run = None  # releases its arguments
        self._done.set()
        self._end.set_result(None)

    # torch's names

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is done; raise its error."""
        seconds = timeout.total_seconds() or None
        if not self._done.wait(seconds):
            raise RuntimeError(f"Timed out waiting {1000 * (seconds or 0):.0f}ms for {self._name} to complete")
        self.result()
        return True

    def get_future(self) -> Future:
        """A future of its tensors."""
        return self._future

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        """Its error."""
        return self._error

    def result(self) -> list[Tensor]:
        """Its tensors; raises its error."""
        if self._error is not None:
            raise self._error
        return self._tensors


class Queue:
    """A thread that runs collectives, and ends when the queue is closed or garbage-collected."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._thread = threading.Thread(target=self._shared.work, name="ring", daemon=True)
        self._thread.start()
        self.close = weakref.finalize(self, self._shared.waiting.put, None)

    def add(self, collective: Collective, at_once: bool) -> Collective:
        """Run a collective after those before it; `at_once` in the caller's thread, which waits, if there are none."""
        if threading.current_thread() is self._thread:  # called in a callback of another one
            collective.run()
            return collective
        with self._shared.lock:
            if at_once and not self._shared.unfinished:
                collective.run()
            else:
                self._shared.unfinished += 1
                self._shared.waiting.put(collective)
        return collective


class _Shared:
    """State that the thread shares with callers, without a reference to the queue."""

    def __init__(self) -> None:
        self.waiting: SimpleQueue[Collective | None] = SimpleQueue()
        self.lock = threading.RLock()
        self.unfinished = 0

    def work(self) -> None:
        """Run collectives in order."""
        while (collective := self.waiting.get()) is not None:
            collective.run()
            del collective  # not kept until the next one comes
            with self.lock:
                self.unfinished -= 1
