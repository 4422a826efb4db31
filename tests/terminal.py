"""Calls a function in a forked process on a terminal, and looks at its screen."""

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyte
import torch

from tests import waiting
from tests.processes import session

FRAMES = re.compile(rb"(?=\r\x1b\[2K)")  # Rich erases a frame, from its last line up, before it draws the next


@dataclass
class Seen:
    """What was on the screen, from top to bottom, whenever the process had written something."""

    code: int = 0
    screens: list[list[str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # all that are left in the end, those scrolled away too
    cursor: bool = True  # whether it is visible in the end


def on_terminal(
    function: Callable[..., Any], *args: Any, columns: int = 80, rows: int = 24, idle: float = 90, **env: str
) -> Seen:
    """What the call shows; `env` replaces variables of the environment. NO_COLOR is unset unless given."""
    child, terminal = pty.fork()
    if child == 0:
        code = 1
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.environ.pop("NO_COLOR", None)
            os.environ.update({"TERM": "xterm-256color", **env})
            torch.set_num_threads(1)
            torch.cuda._is_in_bad_fork = lambda: False  # as in tests/processes.py
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
            function(*args)
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        finally:
            sys.stdout.flush()
            os._exit(code)
    return _watched(child, terminal, columns or 80, rows or 24, idle)


def _watched(child: int, terminal: int, columns: int, rows: int, idle: float) -> Seen:
    screen = pyte.HistoryScreen(columns, rows, history=10_000)
    stream, seen = pyte.ByteStream(screen), Seen()
    while waiting.wait(lambda: select.select([terminal], [], [], 0)[0], partial(session, child), idle):
        try:
            content = os.read(terminal, 65536)
        except OSError:  # the process has ended
            break
        for part in FRAMES.split(content):  # what is read at once may end one frame and erase it for the next
            stream.feed(part)
            seen.screens.append([line.rstrip() for line in screen.display])
    else:
        os.kill(child, 9)
    os.close(terminal)
    status = os.waitpid(child, 0)[1]
    seen.code = os.waitstatus_to_exitcode(status)
    above = ["".join(line[x].data for x in range(columns)).rstrip() for line in screen.history.top]
    seen.lines = [line for line in [*above, *(line.rstrip() for line in screen.display)] if line]
    seen.cursor = not screen.cursor.hidden
    return seen
