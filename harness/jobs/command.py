"""The command of a job, which any machine can run: plain Python, as engines send it there."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from apprentice.children import following

# Variables by which launchers and engines tell a process its rank: a job starts ranks of its own.
PREFIXES = ("MPI_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
NAMES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
})  # fmt: skip
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
        kept = {name: value for name, value in os.environ.items() if not is_launchers(name)}
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


def is_launchers(name: str) -> bool:
    """Return whether a launcher or an engine tells a process by this variable which rank it is."""
    return name in NAMES or name.startswith(PREFIXES)


def _prepare() -> Callable[[], None]:
    """Return what the child does before its program starts.

    It ignores SIGUSR2, which SLURM sends to all processes of a job and submitit answers.
    """
    follow = following(signal.SIGTERM)

    def prepare() -> None:
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        follow()

    return prepare
