"""Where calls of another rank wait until this rank's main thread attends to them."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from strategies.rpc import agents


class MainThreadQueue:
    """Calls of one rank, which RPC brings in threads of its own, are computed in the main thread, in its contexts.

    Autocast, keyed noise, whether gradients are wanted: all that belongs to the thread in which a hook runs.

    Args:
        caller: the rank that calls.
        timeout: seconds it may take until it does.
    """

    def __init__(self, caller: int, timeout: float) -> None:
        self.caller, self.timeout = caller, timeout
        self._calls: queue.Queue[tuple[str, tuple, Future]] = queue.Queue()

    def call(self, what: str, *args: Any) -> Any:
        """What the main thread makes of these arguments; in the thread of a call from elsewhere."""
        answer: Future = Future()
        self._calls.put((what, args, answer))
        return answer.result()

    def attend(self, what: str, compute: Callable[..., Any]) -> None:
        """Wait for the next call, which has to be for this, and answer it; in the main thread.

        Raises:
            RuntimeError: the caller has gone, or is too late.
        """
        watch = agents.Watch(self.timeout)
        while True:
            try:
                wanted, args, answer = self._calls.get(timeout=agents.ROUND)
                break
            except queue.Empty:
                watch.look([self.caller])
        assert wanted == what, f"asked to {wanted}, where all others {what}"
        try:
            answer.set_result(compute(*args))
        except Exception as error:
            answer.set_exception(error)
            raise
