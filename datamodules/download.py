"""Fetching with a limit on patience: torchvision's downloads wait for ever for a server that never answers."""

import contextlib
import io
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ANSWER = 10.0  # seconds that one connection may stay silent
PATIENCE = 15.0  # seconds in which something must be written, however many addresses and mirrors are tried


def fetch(download: Callable[[], object], targets: Sequence[Path]) -> None:
    """Run `download`, quietly unless someone is watching.

    The time limits of sockets are not enough: a name with eight addresses waits eight times, and looking the name up
    has no limit. So the download runs in a thread, which is left behind when it has written nothing for PATIENCE
    seconds.

    Args:
        download: does it.
        targets: the files and folders that it writes.

    Raises:
        TimeoutError: nothing was written for PATIENCE seconds.
        Exception: whatever `download` raised.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            download()
        except BaseException as error:  # noqa: BLE001 - it is raised again by the thread that waits
            raised.append(error)

    worker = threading.Thread(target=run, daemon=True)  # so that a stalled one does not keep the process from ending
    written, last = -1, time.monotonic()
    with _silent_sockets_fail(), _quiet():
        worker.start()
        while worker.is_alive():
            worker.join(0.1)
            if (now_written := sum(map(_bytes_at, targets))) != written:
                written, last = now_written, time.monotonic()
            elif time.monotonic() - last > PATIENCE:
                raise TimeoutError(f"nothing came for {PATIENCE:g} seconds")
    if raised:
        raise raised[0]


def _bytes_at(target: Path) -> int:
    return sum(path.stat().st_size for path in (target, *target.rglob("*")) if path.is_file())


@contextlib.contextmanager
def _silent_sockets_fail() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(ANSWER)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars in a log file."""
    if sys.stderr.isatty():
        yield
        return
    nowhere = io.StringIO()
    with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield
