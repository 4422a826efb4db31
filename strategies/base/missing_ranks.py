"""Who is missing: after a collective has failed, the ranks that are left tell the absent from the present."""

import contextlib
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE = 3.0  # seconds in which a rank that is there answers; a launcher ends us sooner where a rank has died
SIGNS = (
    "Timed out",
    "timed out",
    "timeout caused",  # gloo's, of a connection that it closed because another operation timed out
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Watchdog",
    "connectFullMesh",
)


def raise_for_missing(exception: BaseException, timeout: float, one_speaks: bool = False) -> None:
    """Raise an error that names the ranks that don't answer, if `exception` came from a collective.

    Args:
        exception: what ended this rank.
        timeout: seconds after which a collective gives up.
        one_speaks: of those that are left, only the first one names them; for ranks that all write to one terminal.

    Raises:
        TimeoutError: they are late.
        ConnectionError: they have gone.
        SystemExit: another rank says so.
    """
    text = str(exception)
    if not isinstance(exception, RuntimeError) or not any(sign in text for sign in SIGNS):
        return
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    absent = _absent()
    if not absent:
        return
    if one_speaks and any(rank not in absent for rank in range(dist.get_rank())):
        raise SystemExit(2)
    names = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {', '.join(map(str, absent))}"
    if "imed out" in text or "timeout" in text:
        expected = "expected every rank to come within that time"
        raise TimeoutError(f"--trainer.strategy.timeout {timeout:g}: {names} kept the others waiting; {expected}")
    has, its = ("has", "its") if len(absent) == 1 else ("have", "their")
    raise ConnectionError(f"{names} {has} gone; {its} own message, if there is one, is above") from exception


def _absent() -> list[int]:
    """The ranks that have not answered after a while; rank 0 keeps the store, so without it there is no answer."""
    found = [0]
    caller = threading.Thread(target=_call, args=(found,), daemon=True)
    caller.start()
    caller.join(PATIENCE + 2)
    return list(found)


def _call(found: list[int]) -> None:
    with contextlib.suppress(dist.DistNetworkError):  # the store has gone, and rank 0 with it
        found[:] = _silent(_get_default_store())


def _silent(store: dist.Store) -> list[int]:
    store.set(f"present/{dist.get_rank()}", "")
    deadline = time.monotonic() + PATIENCE
    absent = list(range(dist.get_world_size()))
    while absent and time.monotonic() < deadline:
        absent = [rank for rank in absent if not store.check([f"present/{rank}"])]
        time.sleep(0.05)
    return absent
