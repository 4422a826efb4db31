"""What engines of jobs have in common: their options, what a job needs, and how one has ended."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from apprentice.errors import BadInput
from harness.jobs.command import Command


class Outcome(NamedTuple):
    """How a job ended."""

    code: int  # its exit code; negative for a signal
    why: str = ""  # what its engine says

    @property
    def is_lost(self) -> bool:
        """Whether it was killed: started again, it goes on from its last checkpoint."""
        return self.code < 0 or self.code >= 128

    def __str__(self) -> str:
        said = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return self.why or said


KILLED = -9


class Running(Protocol):
    """A job that an engine has."""

    def poll(self) -> Outcome | None:
        """Return how it ended; None while it waits or runs."""

    def cancel(self) -> None:
        """Ask it to save and stop."""


Start = Callable[[str, Command], Running]  # takes a name and its command


@dataclass(frozen=True)
class Needs:
    """What each job needs."""

    cores: int
    gpus: int = 0
    device: str = "cpu"  # the type on which it trains where it is started from, as torch names it


class Launcher:
    """The base of engines.

    Args:
        jobs: that run at a time, at most; by default as many as the engine has room for.
        students: of a seed that train in one job, at most; by default all do, and the teacher runs once for them.
        retries: how often a job that was killed is started again; it goes on from its last checkpoint.
    """

    patience = 60.0  # seconds for cancelled jobs to end
    cpus: int | None = None  # of a job; None leaves both to what it needs
    gpus: int | None = None

    def __init__(self, jobs: int | None = None, students: int | None = None, retries: int = 2) -> None:
        self.jobs, self.students, self.retries = jobs, students, retries
        for name, value in (("jobs", jobs), ("students", students)):
            if value is not None and value < 1:
                raise BadInput(name, value, f"a number of {name}, at least 1")
        if retries < 0:
            raise BadInput("retries", retries, "a number of times, 0 or more")

    def check(self) -> None:
        """Raise BadInput if this machine can't use the engine."""

    def limit(self, needs: Needs) -> int | None:
        """Return how many jobs run at a time; None leaves it to the engine."""
        return self.jobs

    def requested(self, needs: Needs) -> Needs:
        """Return the cores and GPUs of a job that the engine is asked for: those that were chosen, or that it needs."""
        return replace(needs, cores=self.cpus or needs.cores, gpus=needs.gpus if self.gpus is None else self.gpus)

    def open(self, folder: Path, needs: Needs) -> AbstractContextManager[Start]:
        """Inside, jobs can be started; `folder` is for the engine's files, which all machines see."""
        raise NotImplementedError
