"""Runs jobs: those that can begin, as many at a time as there is room for, and again those that were killed."""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.jobs.base import Launcher, Needs, Outcome, Running
from harness.jobs.command import Command
from harness.runs import signals
from harness.runs.progress import clock
from harness.runs.quiet import notice

POLLING = 0.1  # seconds
GOES_ON = "what has ended is kept, and --resume true goes on"


@dataclass(frozen=True)
class Job:
    """A command that runs once, after the job of another name if there is one."""

    name: str
    command: Command
    after: str | None = None


class Queue:
    """The jobs of a launcher, each of which waits, runs or has ended.

    Args:
        launcher: the engine.
        jobs: in the order in which they start, each after those that it waits for.
    """

    def __init__(self, launcher: Launcher, jobs: Sequence[Job]) -> None:
        self.launcher, self.count = launcher, len(jobs)
        self.waiting = {job.name: job for job in jobs}
        self.running: dict[str, Running] = {}
        self.started: dict[str, float] = {}
        self.failed: dict[str, str] = {}  # what is said of jobs that failed
        self.kills = Counter[str]()
        self.jobs = dict(self.waiting)

    def run(self, folder: Path, needs: Needs) -> None:
        """Run all jobs; a job that fails does not stop the others, but for those that wait for it.

        Raises:
            Interrupted: the user asked to stop; the jobs have saved.
            ChildProcessError: some failed; names them, with their logs.
        """
        limit = self.launcher.limit(needs) or self.count
        with signals.defer_signals(), self.launcher.open(folder, needs) as start:
            try:
                while (self.waiting or self.running) and signals.State.requested is None:
                    ready = [job for job in self.waiting.values() if self._can_start(job)]
                    for job in ready[: max(0, limit - len(self.running))]:
                        if signals.State.requested is not None:  # an engine may take seconds a job
                            break
                        del self.waiting[job.name]
                        self.started.setdefault(job.name, time.monotonic())
                        self.running[job.name] = start(job.name, job.command)
                    for name, running in list(self.running.items()):
                        if (outcome := running.poll()) is not None:
                            del self.running[name]
                            self._end(name, outcome)
                    time.sleep(POLLING)
            finally:
                self._cancel()
        signals.stop_if_requested()
        if self.failed:
            raise ChildProcessError(f"{'; '.join(self.failed.values())}; {GOES_ON}")

    def _can_start(self, job: Job) -> bool:
        return job.after not in self.waiting and job.after not in self.running

    def _end(self, name: str, outcome: Outcome) -> None:
        """Tell how a job ended; queue it again if it was killed, and drop those that wait for it if it failed."""
        job = self.jobs[name]
        if outcome.code == 0:
            done = self.count - len(self.waiting) - len(self.running) - len(self.failed)
            notice(f"job {name}: done after {clock(time.monotonic() - self.started[name])}, {done} of {self.count}")
        elif outcome.is_lost and self.kills[name] < self.launcher.retries:
            self.kills[name] += 1
            notice(f"job {name}: lost ({outcome}); it goes on, {self.kills[name]} of {self.launcher.retries} retries")
            self.waiting = {name: job, **self.waiting}
        else:
            said = "" if outcome.is_lost else read_last_line(job.command.log)
            self.failed[name] = f"job {name}: {said or outcome} (log: {job.command.log})"
            sys.stderr.write(f"job {name}: failed ({outcome})\n")
            for other in [other for other in self.waiting.values() if other.after == name]:
                del self.waiting[other.name]
                self.count -= 1

    def _cancel(self) -> None:
        """Cancel what still runs, and give it time to save."""
        for running in self.running.values():
            running.cancel()
        deadline = time.monotonic() + self.launcher.patience
        while self.running and time.monotonic() < deadline:
            self.running = {name: running for name, running in self.running.items() if running.poll() is None}
            time.sleep(POLLING)


def read_last_line(log: str) -> str:
    """Return the last line of a job's log that is not empty, without "error: "; "" if there is none."""
    path = Path(log)
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.exists() else []
    return next((line.strip().removeprefix("error: ") for line in reversed(lines) if line.strip()), "")
