"""Runs an experiment's main in a process forked from this warm interpreter, and sees that nothing is left of it."""

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.util
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import waiting

CONTEXT: Any = multiprocessing.get_context("fork")


class Run:
    """A forked call, in a session of its own; its output goes to a file, stderr to another if one is given."""

    def __init__(self, function: Callable[..., Any], *args: Any, log: Path, errors: Path | None = None) -> None:
        self.log, self.errors = log, errors or log
        self.process = CONTEXT.Process(target=self._run, args=(function, *args))
        self.process.start()

    def _run(self, function: Callable[..., Any], *args: Any) -> None:
        os.setsid()
        atexit._clear()  # the parent's
        atexit.register(multiprocessing.util._exit_function)  # as in any program
        torch.set_num_threads(1)  # the parent has used OpenMP
        # It has counted CUDA devices too: that marks each child as unfit for CUDA, from which Lightning won't fork.
        torch.cuda._is_in_bad_fork = lambda: False
        with self.log.open("a") as file, self.errors.open("a") as errors:
            os.dup2(file.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.stdout, sys.stderr = file, file if self.errors == self.log else errors
            faulthandler.enable(errors)  # where it, or a rank, is killed by SIGSEGV; pytest's own goes where none looks
            try:
                function(*args)
            except SystemExit as end:
                # As any program ends, whatever its exit functions raise. A forked call would return here: it kills the
                # workers that torch ends in an exit function, and its code is 1 if torch's SIGCHLD handler then raises.
                try:
                    atexit._run_exitfuncs()
                finally:
                    self._end(end.code)
            except BaseException:  # noqa: BLE001 - it is printed, and ends the process
                traceback.print_exc()
                self._end(1)

    @staticmethod
    def _end(code: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)

    def processes(self) -> list[int]:
        """It, and those of its session, that are alive."""
        itself = [self.process.pid] if self.process.exitcode is None else []  # it may not lead a session yet
        return [*{*itself, *session(self.process.pid)}]

    def wait(self, idle: float = 90) -> int:
        """The exit code; fails when the process or one of its ranks does not end and is idle for so many seconds."""
        alive = not waiting.wait(lambda: self.process.exitcode is not None, self.processes, idle)
        left = [] if alive else self._left()
        for pid in [self.process.pid, *left] if alive else left:
            os.kill(pid, 9)
        assert not alive, f"idle for {idle} s:\n{self.output}"
        assert not left, f"left behind: {left}\n{self.output}"
        return self.process.exitcode

    def check(self, code: int = 0) -> str:
        """The output, once it has ended with this code."""
        assert self.wait() == code, self.output
        return self.output

    def end(self) -> None:
        """Kill it with its ranks."""
        for pid in {self.process.pid, *self.processes()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.process.join()

    def _left(self) -> list[int]:
        waiting.wait(lambda: not self.processes(), self.processes, 10)
        return self.processes()

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def said(self) -> str:
        """The output without the lines that tell what will run, and where it is written."""
        lines = self.output.splitlines(keepends=True)
        return "".join(line for line in lines if not re.match(r"\w+: data |writes to ", line))


def launched(rank: int, size: int, port: int, function: Callable[..., None], path: Path) -> None:
    """A rank as torchrun starts it."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({key: str(value) for key, value in given.items()})
    function(rank, path)


def launch(function: Callable[..., None], path: Path, size: int = 2) -> list[Run]:
    """Ranks that torchrun might have started; each calls `function(rank, path)`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [Run(launched, rank, size, port, function, path, log=path / f"{rank}.log") for rank in range(size)]


def session(leader: int) -> list[int]:
    """Processes of a session, but for those that are only waited for."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _ppid, _group, sid = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(sid) == leader and state != "Z":
            found.append(int(stat.parent.name))
    return found
