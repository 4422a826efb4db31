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


class Collective(dist.Work):
    """A collective that was called, as torch returns it to the caller; `run` computes `tensors`."""

    def __init__(self, name: str, run: Callable[[], None], tensors: list[Tensor]) -> None:
        super().__init__()
        self._name, self._run, self._tensors = name, run, tensors
        self._done = threading.Event()
        self._error: Exception | None = None
        self._end: Future[None] = Future()
        # An error raised in a callback reaches DDP's reducer; `set_exception` reaches only Python.
        self._future = self._end.then(lambda _: self.result())

    def run(self) -> None:
        """Execute it, and wake those who wait for it."""
        try:
            with torch.inference_mode():  # accepts inference tensors, too, and keeps no graph
                self._run()
        except Exception as error:  # noqa: BLE001 - raised where the collective is waited for
            self._error = error
        del self._run  # releases its arguments
        self._done.set()
        self._end.set_result(None)

    # torch's names

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        seconds = timeout.total_seconds() or None
        if not self._done.wait(seconds):
            raise RuntimeError(f"Timed out waiting {1000 * (seconds or 0):.0f}ms for {self._name} to complete")
        self.result()
        return True

    def get_future(self) -> Future:
        return self._future

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors


class Queue:
    """A thread that runs collectives, and ends when the queue is closed or garbage-collected."""

    def __init__(self) -> None:
        waiting: SimpleQueue[tuple[Collective, threading.Event] | None] = SimpleQueue()
        self._put, self.close = waiting.put, weakref.finalize(self, waiting.put, None)
        self._lock = threading.RLock()
        self._last_ended = threading.Event()  # with its callbacks
        self._last_ended.set()
        self._thread = threading.Thread(target=_work, args=[waiting], name="ring", daemon=True)
        self._thread.start()

    def add(self, collective: Collective, at_once: bool) -> Collective:
        """Run a collective after those before it; `at_once` in the caller's thread, which waits, if there are none."""
        if threading.current_thread() is self._thread:  # called in a callback of another one
            collective.run()
            return collective
        with self._lock:
            if at_once and self._last_ended.is_set():
                collective.run()
            else:
                self._last_ended = threading.Event()
                self._put((collective, self._last_ended))
        return collective


def _work(waiting: SimpleQueue) -> None:
    while (item := waiting.get()) is not None:
        collective, ended = item
        collective.run()
        ended.set()
        del item, collective  # not kept until the next one comes
