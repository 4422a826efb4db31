"""The door to `harness.jobs`, by which fits are jobs of an engine: no other file outside names that package.

It is imported where `launcher` chooses an engine, where this process is a job, and where a folder has had jobs.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from apprentice.errors import BadInput
from harness import cli
from harness.runs import environment
from harness.runs.plans import FitPlan
from harness.runs.session import Session

KEY = "launcher"  # its flag
VARIABLE = "APPRENTICE_JOB"  # the file of the job that this process is
ENGINES = {"local": "Local", "ray": "Ray", "slurm": "Slurm"}  # their classes
FITS = "harness.jobs.fits"


class Launcher:
    """What the engines have in common that the command line sets; `harness.jobs.base.Engine` is the base of theirs.

    Args:
        jobs: that run at a time, at most; by default as many as the engine has room for.
        students: of a seed that train in one job, at most; by default all do, and the teacher runs once for them.
        retries: how often a job that was killed is started again; it goes on from its last checkpoint.
    """

    def __init__(self, jobs: int | None = None, students: int | None = None, retries: int = 2) -> None:
        self.jobs, self.students, self.retries = jobs, students, retries
        for name, value in (("jobs", jobs), ("students", students)):
            if value is not None and value < 1:
                raise BadInput(name, value, f"a number of {name}, at least 1")
        if retries < 0:
            raise BadInput("retries", retries, "a number of times, 0 or more")

    def run(self, session: Session, study: Callable[..., Any], plans: Sequence[FitPlan]) -> None:
        """Run the fits that are not finished as jobs, and wait for them; `study` is of the experiment's script.

        Raises:
            Interrupted: the user asked to stop.
            ChildProcessError: a job failed.
        """
        import_module(FITS).run_fits(session, self, study, plans)


class Engines(ModuleType):
    """The module of engines, imported when one is looked up."""

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


class Launchers(cli.Classes):
    """Engines by name, in small letters."""

    @property
    def by_name(self) -> dict[str, type]:
        return {name: getattr(self.package, of_class) for name, of_class in ENGINES.items()}

    def get(self, name: str) -> type | None:
        return self.by_name.get(name.lower())

    def _whole(self, name: Any) -> str:
        return super()._whole(ENGINES.get(str(name).lower(), name))


LAUNCHERS = Launchers((Launcher,), Engines("harness.jobs.engines"))


def is_job() -> bool:
    """Return whether this process is a job."""
    return VARIABLE in os.environ


def find_launcher(session: Session) -> Launcher | None:
    """Make the chosen engine, if one is chosen; BadInput if it can't be used here."""
    if is_job() or vars(session.config).get(KEY) is None:
        return None
    launcher: Launcher = import_module(FITS).build_launcher(session)
    return launcher


class Study(Protocol):
    """What trains and tests what is planned."""

    def fit(self, plan: FitPlan, /) -> Any: ...


def do_job(session: Session, study: Callable[[Session], Study]) -> bool:
    """Fit what this process is to, if it is a job; return whether it is.

    `study` takes the session of the job's fits, which is of a search if they are.
    """
    if is_job():
        import_module(FITS).do_work(session, study)
    return is_job()


def without_jobs(session: Session, plan: FitPlan) -> AbstractContextManager[None]:
    """Hold the locks of a seed's jobs during a fit here: an engine may have some yet, if their starter was killed.

    One that runs ends first; one that is queued waits, and finds its fits done.
    """
    if is_job() or not (session.out / environment.JOBS).exists():
        return nullcontext()
    held: AbstractContextManager[None] = import_module(FITS).without_jobs(session, plan)
    return held
