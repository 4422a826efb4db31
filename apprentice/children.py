"""Processes that end with the one that has started them, on Linux: however it ends, nothing is left of it."""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

SET_PARENTS_END = 1  # prctl's PR_SET_PDEATHSIG


def end_with_parent() -> None:
    """Let this process, which multiprocessing has started, be killed when its parent ends; now, if it has ended."""
    parent = multiprocessing.parent_process()
    _follow(_libc(), os.getppid() if parent is None else parent.pid, signal.SIGKILL)


def following(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Return the `preexec_fn` of a program that shall get this signal when this process ends."""
    return partial(_follow, _libc(), os.getpid(), signum)  # a library may not be loaded between fork and exec


def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def _follow(libc: Any, parent: int | None, signum: int) -> None:
    if libc is not None:
        libc.prctl(SET_PARENTS_END, signum)
    if os.getppid() != parent:  # it ended before
        os._exit(128 + signum)
