"""Waits for processes for as long as they work: on a loaded machine all of them take longer, and none of them hangs."""

import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

LIMIT = 900.0  # seconds, however much they work
SHARE = 0.02  # of a CPU, which processes use that do more than look whether something has happened
TICKS = 100  # a second, in /proc
LEAVING = (
    10.0  # seconds that a process may take to give its memory back: it has no environment any more, nor a code yet
)


def cpu_seconds(pids: Iterable[int]) -> float:
    """The CPU time that processes have used, with that of their children that have ended."""
    total = 0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return total / TICKS


def wait(happens: Callable[[], object], pids: Callable[[], Iterable[int]], idle: float = 60.0) -> bool:
    """Whether it happens before the processes have ended, or been idle for so many seconds."""
    begun = worked = looked = time.monotonic()
    used = cpu_seconds(pids())
    while not happens():
        now = time.monotonic()
        if now - looked > min(0.5, idle / 4):
            looked, alive = now, list(pids())
            if abs(cpu_seconds(alive) - used) >= SHARE * idle:
                worked, used = now, cpu_seconds(alive)
            idle = idle if alive else min(idle, now - worked + LEAVING)
        if now - worked > idle or now - begun > LIMIT:
            return bool(happens())
        time.sleep(0.02)
    return True


def heed_interrupts() -> None:
    """Take SIGINT, also where a shell has started this process in the background and ignores it for all below."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
