"""Finds ranks that stopped responding after a failed collective."""

import contextlib
import re
import threading
import time

import torch.distributed as dist

from apprentice.errors import BadInput
from strategies.base.private import default_store

STOP = "should_stop"
RESPONSE_TIME = 3.0  # seconds in which a rank that is there responds; a launcher ends us sooner after a rank's death
# "timeout caused": gloo closed a connection because another operation timed out
SIGNS = re.compile("[Tt]imed out|timeout caused|Connection (closed|reset)|Broken pipe|Watchdog|connectFullMesh")


def raise_for_missing(
    exception: BaseException, timeout: float, first_only: bool = False, should_stop: bool = False
) -> None:
    """Raise an error that names the ranks that don't respond, if `exception` came from a collective.

    TimeoutError: they did not come within `timeout` seconds; ConnectionError: they have gone; BadInput: all respond,
    and on some of them training `should_stop`; SystemExit, with `first_only`: another rank reports that, as all write
    to one terminal.
    """
    text = str(exception)
    collective = isinstance(exception, RuntimeError) and SIGNS.search(text)
    if not collective or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    responses = exchange("present", STOP * should_stop, RESPONSE_TIME)
    # Rank 0 serves the store.
    missing = [0] if responses is None else [rank for rank in range(dist.get_world_size()) if rank not in responses]
    if responses is not None and not missing:
        _raise_for_stopped([rank for rank, value in responses.items() if value == STOP])
        return
    if first_only and any(rank not in missing for rank in range(dist.get_rank())):
        raise SystemExit(2)
    names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    if "imed out" in text or "timeout" in text:
        expected = "expected every rank to come within that time"
        raise TimeoutError(f"--trainer.strategy.timeout {timeout:g}: {names} kept the others waiting; {expected}")
    has, its = ("has", "its") if len(missing) == 1 else ("have", "their")
    raise ConnectionError(f"{names} {has} gone; {its} own message, if there is one, is above") from exception


def leave_stopped() -> None:
    """Let ranks that still train learn from `raise_for_missing` that this one has ended by `should_stop`."""
    if dist.is_initialized():
        default_store().set(f"present/{dist.get_rank()}", STOP)


def _raise_for_stopped(stopped: list[int]) -> None:
    """Raise BadInput if some ranks have left the training loop, and others wait for them in it."""
    if 0 < len(stopped) < dist.get_world_size():
        names = f"rank {stopped[0]}" if len(stopped) == 1 else f"ranks {', '.join(map(str, stopped))}"
        expected = "it on all ranks after the same step, or on none"
        raise BadInput("", "trainer.should_stop", f"{expected}; it is set on {names} alone")


def exchange(key: str, value: str, seconds: float) -> dict[int, str] | None:
    """Return the values of the ranks that call this within so many seconds; None if the store does not answer."""
    result: list[dict[int, str]] = []

    def ask() -> None:
        store, deadline, responses = default_store(), time.monotonic() + seconds, dict[int, str]()
        with contextlib.suppress(dist.DistNetworkError):  # the store has gone, and rank 0 with it
            store.set(f"{key}/{dist.get_rank()}", value)
            while len(responses) < dist.get_world_size() and time.monotonic() < deadline:
                absent = [rank for rank in range(dist.get_world_size()) if rank not in responses]
                arrived = [rank for rank in absent if store.check([f"{key}/{rank}"])]
                responses |= {rank: store.get(f"{key}/{rank}").decode() for rank in arrived}
                time.sleep(0.05)
            result.append(dict(sorted(responses.items())))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + 2)
    return result[0] if result else None
