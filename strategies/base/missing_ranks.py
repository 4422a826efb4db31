"""Finds ranks that stopped responding after a failed collective."""

import contextlib
import re
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

RESPONSE_TIME = 3.0  # seconds in which a rank that is there responds; a launcher ends us sooner after a rank's death
# "timeout caused": gloo closed a connection because another operation timed out
SIGNS = re.compile("[Tt]imed out|timeout caused|Connection (closed|reset)|Broken pipe|Watchdog|connectFullMesh")


def raise_for_missing(exception: BaseException, timeout: float, first_only: bool = False) -> None:
    """Raise an error that names the ranks that don't respond, if `exception` came from a collective.

    TimeoutError: they did not come within `timeout` seconds; ConnectionError: they have gone; SystemExit, with
    `first_only`: another rank reports that, as all write to one terminal.
    """
    text = str(exception)
    collective = isinstance(exception, RuntimeError) and SIGNS.search(text)
    if not collective or not dist.is_initialized() or dist.get_world_size() == 1 or not (missing := _missing()):
        return
    if first_only and any(rank not in missing for rank in range(dist.get_rank())):
        raise SystemExit(2)
    names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    if "imed out" in text or "timeout" in text:
        expected = "expected every rank to come within that time"
        raise TimeoutError(f"--trainer.strategy.timeout {timeout:g}: {names} kept the others waiting; {expected}")
    has, its = ("has", "its") if len(missing) == 1 else ("have", "their")
    raise ConnectionError(f"{names} {has} gone; {its} own message, if there is one, is above") from exception


def _missing() -> list[int]:
    """The ranks that don't respond; only rank 0 if the store, which it serves, does not answer either."""
    found = [0]

    def ask() -> None:
        store, deadline = _get_default_store(), time.monotonic() + RESPONSE_TIME
        silent = list(range(dist.get_world_size()))
        with contextlib.suppress(dist.DistNetworkError):  # the store has gone, and rank 0 with it
            store.set(f"present/{dist.get_rank()}", "")
            while silent and time.monotonic() < deadline:
                silent = [rank for rank in silent if not store.check([f"present/{rank}"])]
                time.sleep(0.05)
            found[:] = silent

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(RESPONSE_TIME + 2)
    return list(found)
