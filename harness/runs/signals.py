"""Ctrl-C, SIGTERM and SIGHUP: a fit finishes its batch, saves and stops; outside of a fit the process ends at once.

A handler raises nothing: an exception is lost in a callback of a weak reference or of C, in `__del__` or in somebody's
`except`. Files are written whole or not at all, so a process may end anywhere.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from harness.start import leave

SAVED = 75  # exit code of a rank that stopped after saving (EX_TEMPFAIL: try again later)
SIGHUP = getattr(signal, "SIGHUP", None)  # the terminal was closed; Windows has none
SIGCHLD = getattr(signal, "SIGCHLD", None)
PATIENCE = 2.0  # seconds for exit functions, which remove temporary folders
RANKS_PATIENCE = 1.0  # seconds for ranks to end their own processes
FORWARDED = getattr(signal, "SIGUSR1", signal.SIGINT)  # from a process to its ranks; Windows has no SIGUSR1


class Interrupted(SystemExit):
    """The user asked to stop; the exit code is the shell's for that signal."""


class State:
    """The state of signal handling in this process."""

    requested: int | None = None  # the signal on which a fit is to save and stop
    by_user = False  # whether the signal came from the user, not only from the parent process
    deferring = False  # whether a fit that saves on a signal runs or starts
    owner = 0  # the process that handles signals, not a rank that it forked
    ending = False  # whether exit functions run
    advice = ""  # the line on how to resume the run, while there is one


def stop_if_requested() -> None:
    """Raise Interrupted if a signal came while signals were deferred."""
    if State.requested is not None:
        raise Interrupted(128 + State.requested)


def _handle(signum: int, _frame: Any) -> None:
    if signum == SIGHUP:
        leave()  # a line printed to a terminal that is gone would end the fit before it saves
    again = State.requested is not None and State.by_user
    State.requested, State.by_user = signum, signum != FORWARDED
    if not State.deferring or again:
        _end(128 + signum)
    for child in multiprocessing.active_children():
        if child.pid is not None:
            os.kill(child.pid, FORWARDED)


def _end(code: int) -> None:
    """End this process and its children, after the line on how to resume the run."""
    is_rank = os.getpid() != State.owner  # a forked one, whose parent prints the line and removes its folders
    if hasattr(sys, "ps1") and not is_rank:
        raise Interrupted(code)  # in a notebook, which goes on
    if SIGCHLD is not None:
        signal.signal(SIGCHLD, signal.SIG_DFL)  # torch's handler raises where a worker that loads data is killed
    _end_children(at_once=is_rank or State.deferring)
    if not is_rank and not State.ending:
        State.ending = True
        timer = threading.Timer(PATIENCE, os._exit, [code])
        timer.daemon = True
        timer.start()
        with suppress(Exception):  # the signal came in a write, or nobody reads
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, State.advice.encode())
        with suppress(BaseException):  # whatever exit functions raise
            atexit._run_exitfuncs()
    os._exit(code)


def _end_children(at_once: bool) -> None:
    children = multiprocessing.active_children()
    if not at_once:  # a rank ends its workers first: one that sends to a rank that is gone prints a traceback
        for child in children:
            if child.pid is not None:
                os.kill(child.pid, FORWARDED)
        until = time.monotonic() + RANKS_PATIENCE
        for child in children:
            child.join(max(0.0, until - time.monotonic()))
    for child in children:
        child.kill()


def _handle_forwarded(_signum: int, _frame: Any) -> None:
    """Handle a forwarded signal once: a terminal signals this rank as well, `kill` only its parent."""
    if State.requested is None:
        _handle(FORWARDED, None)


def _install() -> dict[int, Any]:
    stopping = [signal.SIGINT, signal.SIGTERM]
    if SIGHUP is not None and signal.getsignal(SIGHUP) is not signal.SIG_IGN:  # `nohup` ignores it
        stopping.append(SIGHUP)
    before = {s: signal.signal(s, _handle) for s in stopping}
    return before | {FORWARDED: signal.signal(FORWARDED, _handle_forwarded)}


@contextmanager
def handle_signals() -> Iterator[None]:
    """Inside, handle these signals; does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _install()
    State.requested, State.by_user, State.owner = None, False, os.getpid()
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def advise_at_stop(line: str) -> Iterator[None]:
    """Inside, a signal that ends the process prints the line."""
    State.advice = line
    try:
        yield
    except Interrupted:
        sys.stderr.write(line)
        raise
    finally:
        State.advice = ""


@contextmanager
def defer_signals() -> Iterator[None]:
    """Inside, the first signal only sets `requested`; a second one stops at once."""
    State.deferring = True
    try:
        yield
    finally:
        State.deferring = False


def take_over() -> None:
    """Replace Lightning's handlers in a rank, which would communicate with other ranks inside a signal handler."""
    State.deferring = True  # a spawned rank does not inherit it
    if threading.current_thread() is threading.main_thread():
        _install()
