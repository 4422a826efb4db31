"""The command of a job, which any machine can run: plain Python, as engines send it there."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

# Variables by which launchers and engines tell a process its rank: a job starts ranks of its own.
PREFIXES = ("MPI_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
NAMES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
})  # fmt: skip
SET_PARENTS_END = 1  # prctl's PR_SET_PDEATHSIG
SAVING = 60.0  # seconds for a job that is stopped to save


@dataclass(frozen=True)
class Command:
    """A program with its arguments, in a folder and with an environment; called, it runs and returns the exit code."""

    words: tuple[str, ...]
    folder: str  # the working directory
    log: str  # the file to which its output is added
    variables: Mapping[str, str] = field(default_factory=dict)  # beside those of the machine that runs it

    def start(self, **variables: str) -> "subprocess.Popen[bytes]":
        """Start the process, in a session of its own; with its parent it is told to stop, on Linux."""
        kept = {name: value for name, value in os.environ.items() if name not in NAMES and not _is_launchers(name)}
        with open(self.log, "ab") as log:  # noqa: PTH123 - a place on the machine that runs it
            return subprocess.Popen(
                self.words, cwd=self.folder, env={**kept, **self.variables, **variables}, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, preexec_fn=_prepare(),  # noqa: PLW1509
            )  # fmt: skip

    def __call__(self) -> int:
        """Run it; where this is interrupted, it saves and stops first."""
        process = self.start()
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SAVING)
            raise

    def checkpoint(self) -> Any:
        """Tell submitit how a job goes on that SLURM preempts or whose time is up: by the same command."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _is_launchers(name: str) -> bool:
    return name.startswith(PREFIXES)


def _prepare() -> Any:
    """Return what the child does before its program starts.

    It ignores SIGUSR2, which SLURM sends to all processes of a job and submitit answers.
    """
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return partial(_follow, library, os.getpid())


def _follow(library: Any, parent: int) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if library is not None:
        library.prctl(SET_PARENTS_END, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)
