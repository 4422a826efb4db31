"""Jobs of SLURM, through submitit: one machine a job."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from apprentice import extras
from apprentice.errors import BadInput
from harness.jobs.base import KILLED, Launcher, Needs, Outcome, Start
from harness.jobs.command import Command
from harness.runs import files

ASKING = 15.0  # seconds between questions to sacct, for jobs that end without a result


class Slurm(Launcher):
    """Jobs of SLURM, through submitit; one that SLURM preempts, or whose time is up, is queued again and goes on.

    Args:
        jobs: that are queued or run at a time, at most; by default all are queued at once.
        students: of a seed that train in one job, at most; by default all do, and the teacher runs once for them.
        retries: how often a job that was killed is queued again; it goes on from its last checkpoint.
        minutes: that a job may take; it has three more times as many, one after the other.
        partition: of the cluster.
        account: that is charged.
        cpus: cores of a job; by default as many as it has threads, or ranks.
        gpus: of a job; by default as many as its devices, if the run trains on GPUs here.
        memory_gb: of a job.
        options: further ones of sbatch, by their long names, such as {qos: long, constraint: a100}.
        cluster: local and debug are submitit's own stand-ins: processes of this machine, or this process itself.
    """

    patience = 10.0  # SLURM ends them, if later than that, a job that takes their place waits for it

    def __init__(
        self,
        jobs: int | None = None,
        students: int | None = None,
        retries: int = 2,
        minutes: int = 60,
        partition: str | None = None,
        account: str | None = None,
        cpus: int | None = None,
        gpus: int | None = None,
        memory_gb: float | None = None,
        options: dict[str, str | int] | None = None,
        cluster: Literal["slurm", "local", "debug"] = "slurm",
    ) -> None:
        super().__init__(jobs, students, retries)
        for name, value, least in (("minutes", minutes, 1), ("cpus", cpus, 1), ("gpus", gpus, 0)):
            if value is not None and value < least:
                raise BadInput(name, value, f"a number of {name}, at least {least}")
        if memory_gb is not None and not memory_gb > 0:
            raise BadInput("memory_gb", memory_gb, "a number above 0")
        self.minutes, self.cpus, self.gpus, self.memory_gb, self.cluster = minutes, cpus, gpus, memory_gb, cluster
        self.sbatch = {"partition": partition, "account": account, "additional_parameters": options}

    def check(self) -> None:
        extras.need("slurm", "submitit")
        from submitit import SlurmExecutor

        if self.cluster == "slurm" and SlurmExecutor.affinity() < 0:
            raise BadInput("launcher", "slurm", "a machine from which SLURM takes jobs; this one has no srun")

    @contextmanager
    def open(self, folder: Path, needs: Needs) -> Iterator[Start]:
        from submitit import AutoExecutor
        from submitit.core.utils import FailedJobError

        executor = AutoExecutor(folder=folder, cluster=self.cluster)
        options: dict[str, Any] = {f"slurm_{name}": value for name, value in self.sbatch.items() if value}
        asked = self.requested(needs)
        options |= {"gpus_per_node": asked.gpus} if asked.gpus else {}
        options |= {"mem_gb": self.memory_gb} if self.memory_gb else {}
        executor.update_parameters(timeout_min=self.minutes, cpus_per_task=asked.cores, **options)

        def start(name: str, command: Command) -> Queued:
            executor.update_parameters(name=name)
            try:
                return Queued(executor.submit(command))
            except (FailedJobError, subprocess.CalledProcessError, OSError) as error:
                said = str(getattr(error, "stderr", None) or error).strip().splitlines() or [""]
                raise ChildProcessError(f"job {name}: sbatch took none: {said[-1]}") from error

        try:
            yield start
        finally:
            for path in folder.rglob("*"):
                files.record(path)


class Queued:
    """A job of submitit."""

    def __init__(self, job: Any) -> None:
        self.job, self.asked = job, time.monotonic()

    def poll(self) -> Outcome | None:
        from submitit.core.utils import FailedJobError, UncompletedJobError

        asks = time.monotonic() - self.asked > ASKING
        self.asked = time.monotonic() if asks else self.asked
        if not self.job.done(force_check=asks):
            return None
        try:
            return Outcome(self.job.result())
        except UncompletedJobError:  # it left no result
            state = str(self.job.state).partition(" ")[0]
            code = 1 if state == "CANCELLED" else KILLED  # who cancels it does not want it started again
            return Outcome(code, f"job {self.job.job_id} of SLURM {state}")
        except FailedJobError as error:
            lines = [line for line in str(error).splitlines() if "Error: " in line]
            return Outcome(1, lines[-1] if lines else f"job {self.job.job_id} of SLURM failed")

    def cancel(self) -> None:
        self.job.cancel(check=False)
