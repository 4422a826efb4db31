"""Jobs of `--launcher local` as forks of a warm process; some tests start theirs as users do, with all imports."""

import contextlib
import os
from pathlib import Path

from experiments import kd
from harness.jobs import command
from harness.jobs.command import Command
from tests.processes import Run, session


class Job(Run):
    """What jobs use of a `Popen`."""

    def poll(self) -> int | None:
        return self.process.exitcode

    def terminate(self) -> None:
        self.process.terminate()


def fork_jobs() -> None:
    """Have this process, a fork, start its jobs as forks; `processes` finds them."""
    Command.start = _start  # type: ignore[assignment,method-assign]


def _start(job: Command, **variables: str) -> Job:
    follow = command._prepare()  # which ends it with this process

    def main() -> None:
        follow()
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if fd.readlink().suffix == ".lock":  # the run's, which a program of its own does not hold
                    os.close(int(fd.name))
        os.environ.update({**job.variables, **variables})
        os.chdir(job.folder)
        kd.main(job.words[2:])

    started = Job(main, log=Path(job.log))
    with _pids(Path(job.log).parents[1]).open("a") as file:
        file.write(f"{started.process.pid}\n")
    return started


def _pids(out: Path) -> Path:
    return out.with_suffix(".pids")


def processes(out: Path) -> list[int]:
    """The jobs of a run that are alive, with their ranks."""
    leaders = _pids(out).read_text().split() if _pids(out).exists() else []
    return [pid for leader in leaders for pid in session(int(leader))]
