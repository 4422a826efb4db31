"""Jobs of SLURM, through submitit: one machine a job."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from apprentice import extras
from apprentice.errors import BadInput
from harness.jobs.base import KILLED, Needs, Outcome, Running, Scheduler, Start
from harness.jobs.command import Command
from harness.runs import files

ASKING = 15  # seconds, at most, between questions to sacct, for jobs that end without a result


class Slurm(Scheduler):
    """Jobs of SLURM, through submitit; one that SLURM preempts, or whose time is up, is queued again and goes on.

    Args:
        minutes: that a job may take; it has three more times as many, one after the other.
        partition: of the cluster.
        account: that is charged.
        memory_gb: of a job.
        options: further ones of sbatch, by their long names, such as {qos: long, constraint: a100}.
        cluster: local and debug are submitit's own stand-ins: processes of this machine, or this process itself.
        others: `jobs` and others of all launchers, `cpus` and `gpus`.
    """

    patience = 10.0  # SLURM ends them, if later than that, a job that takes their place waits for it

    def __init__(
        self,
        minutes: int = 60,
        partition: str | None = None,
        account: str | None = None,
        memory_gb: float | None = None,
        options: dict[str, str | int] | None = None,
        cluster: Literal["slurm", "local", "debug"] = "slurm",
        **others: Any,
    ) -> None:
        super().__init__(**others)
        if minutes < 1:
            raise BadInput("minutes", minutes, "a number of minutes, at least 1")
        if memory_gb is not None and not memory_gb > 0:
            raise BadInput("memory_gb", memory_gb, "a number above 0")
        self.minutes, self.memory_gb, self.cluster = minutes, memory_gb, cluster
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
        from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

        SlurmJob.watcher = SlurmInfoWatcher(delay_s=ASKING)  # it asks once for all jobs, by itself every ten minutes
        executor = AutoExecutor(folder=folder, cluster=self.cluster)
        options: dict[str, Any] = {f"slurm_{name}": value for name, value in self.sbatch.items() if value}
        asked = self.requested(needs)
        options |= {"gpus_per_node": asked.gpus} if asked.gpus else {}
        options |= {"mem_gb": self.memory_gb} if self.memory_gb else {}
        executor.update_parameters(timeout_min=self.minutes, cpus_per_task=asked.cores, **options)

        def start(name: str, command: Command) -> Running:
            executor.update_parameters(name=name)
            try:
                job = executor.submit(command)
            except (FailedJobError, subprocess.CalledProcessError, OSError) as error:
                said = str(getattr(error, "stderr", None) or error).strip().splitlines() or [""]
                raise ChildProcessError(f"job {name}: sbatch took none: {said[-1]}") from error
            return Running(partial(_poll, job), partial(job.cancel, check=False))

        try:
            yield start
        finally:
            for path in folder.rglob("*"):
                files.record(path)


def _poll(job: Any) -> Outcome | None:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    if not job.done():
        return None
    try:
        return Outcome(job.result())
    except UncompletedJobError:  # it left no result
        state = str(job.state).partition(" ")[0]
        code = 1 if state == "CANCELLED" else KILLED  # who cancels it does not want it started again
        return Outcome(code, f"job {job.job_id} of SLURM {state}")
    except FailedJobError as error:
        lines = [line for line in str(error).splitlines() if "Error: " in line]
        return Outcome(1, lines[-1] if lines else f"job {job.job_id} of SLURM failed")
