"""The base of engines: what a job needs, how one has ended, and jobs run to their ends."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

from apprentice.errors import BadInput
from harness.jobs.command import Command
from harness.runs import signals
from harness.runs.progress import clock
from harness.runs.quiet import notice
from harness.studies.launcher import Launcher

POLLING = 0.1  # seconds
GOES_ON = "what has ended is kept, and `resume true` goes on"
KILLED = -9


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


class Running(NamedTuple):
    """A job that an engine has."""

    poll: Callable[[], Outcome | None]  # returns how it ended; None while it waits or runs
    cancel: Callable[[], object]  # asks it to save and stop


Start = Callable[[str, Command], Running]  # takes a name and its command


@dataclass(frozen=True)
class Needs:
    """What each job needs."""

    cores: int
    gpus: int = 0
    device: str = "cpu"  # the type on which it trains where it is started from, as torch names it


@dataclass(frozen=True)
class Job:
    """A command that runs once, after the job of another name if there is one."""

    name: str
    command: Command
    after: str | None = None


class Engine(Launcher):
    """The base of engines: `open` starts jobs, which it may queue."""

    patience = 60.0  # seconds for cancelled jobs to end

    def check(self) -> None:
        """Raise BadInput if this machine can't use the engine."""

    def limit(self, needs: Needs) -> int | None:
        """Return how many jobs run at a time; None leaves it to the engine."""
        return self.jobs

    def open(self, folder: Path, needs: Needs) -> AbstractContextManager[Start]:
        """Inside, jobs can be started; `folder` is for the engine's files, which all machines see."""
        raise NotImplementedError

    def run_jobs(self, jobs: Sequence[Job], folder: Path, needs: Needs) -> None:
        """Run jobs; one that fails does not stop the others, but for those that wait for it.

        Raises:
            Interrupted: the user asked to stop; the jobs have saved.
            ChildProcessError: some failed; names them, with their logs.
        """
        commands, count, done = {job.name: job.command for job in jobs}, len(jobs), 0
        order = TopologicalSorter({job.name: [job.after] if job.after else [] for job in jobs})
        order.prepare()
        waiting, running, limit = [*order.get_ready()], dict[str, Running](), self.limit(needs) or count
        begun, kills, failed = dict[str, float](), Counter[str](), list[str]()
        with signals.defer_signals(), self.open(folder, needs) as start:
            try:
                while (waiting or running) and signals.State.requested is None:
                    while waiting and len(running) < limit and signals.State.requested is None:  # each may take seconds
                        name = waiting.pop(0)
                        begun.setdefault(name, time.monotonic())
                        running[name] = start(name, commands[name])
                    for name, job in [*running.items()]:
                        if (outcome := job.poll()) is None:
                            continue
                        del running[name]
                        if outcome.is_lost and kills[name] < self.retries:
                            kills[name] += 1
                            notice(f"job {name}: lost ({outcome}); it goes on, {kills[name]} of {self.retries} retries")
                            waiting.insert(0, name)
                        elif outcome.code != 0:
                            failed.append(_describe_failure(name, outcome, commands[name].log))
                            sys.stderr.write(f"job {name}: failed ({outcome})\n")
                            count -= sum(job.after == name for job in jobs)
                        else:
                            done += 1
                            notice(f"job {name}: done after {clock(time.monotonic() - begun[name])}, {done} of {count}")
                            order.done(name)
                            waiting += order.get_ready()
                    time.sleep(POLLING)
            finally:
                self._cancel([*running.values()])
        signals.stop_if_requested()
        if failed:
            raise ChildProcessError(f"{'; '.join(failed)}; {GOES_ON}")

    def _cancel(self, running: list[Running]) -> None:
        """Cancel what still runs, and give it time to save."""
        for job in running:
            job.cancel()
        deadline = time.monotonic() + self.patience
        while running and time.monotonic() < deadline:
            running = [job for job in running if job.poll() is None]
            time.sleep(POLLING)


class Scheduler(Engine):
    """The base of engines that have queues, and are asked for what a job needs.

    Args:
        cpus: cores of a job; by default as many as it has threads, or ranks.
        gpus: of a job; by default as many as its devices, if the run trains on GPUs here.
        options: as every launcher has them.
    """

    def __init__(self, cpus: int | None = None, gpus: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        for name, value, least in (("cpus", cpus, 1), ("gpus", gpus, 0)):
            if value is not None and value < least:
                raise BadInput(name, value, f"a number of {name}, at least {least}")
        self.cpus, self.gpus = cpus, gpus

    def requested(self, needs: Needs) -> Needs:
        """Return the cores and GPUs of a job that the engine is asked for: those that were chosen, or that it needs."""
        return replace(needs, cores=self.cpus or needs.cores, gpus=needs.gpus if self.gpus is None else self.gpus)


def _describe_failure(name: str, outcome: Outcome, log: str) -> str:
    """Say why a job failed: by the last line of its log that is not empty, or how it was lost."""
    path = Path(log)
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() and not outcome.is_lost else []
    last = next((line.strip().removeprefix("error: ") for line in reversed(lines) if line.strip()), "")
    return f"job {name}: {last or outcome} (log: {log})"
