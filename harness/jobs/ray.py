"""Jobs as tasks of Ray."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from apprentice import extras
from apprentice.errors import BadInput
from datamodules.streams import cores
from harness.jobs.base import KILLED, Launcher, Needs, Outcome, Start
from harness.jobs.command import Command

# Ray has its own variables; this one, set to "0", keeps it from sending usage statistics.
STATISTICS = "RAY_USAGE_STATS_ENABLED"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ray(Launcher):
    """Tasks of a Ray cluster: of a running one, or of one that is started on this machine for this run.

    Args:
        jobs: that run at a time, at most; by default as many as the cluster has cores for.
        students: of a seed that train in one job, at most; by default all do, and the teacher runs once for them.
        retries: how often a job that was killed is started again; it goes on from its last checkpoint.
        address: of a running cluster, as HOST:PORT, or auto; by default one is started.
        cpus: cores of a job; by default as many as it has threads, or ranks.
        gpus: of a job; by default as many as its devices, if the run trains on GPUs here.
    """

    def __init__(
        self,
        jobs: int | None = None,
        students: int | None = None,
        retries: int = 2,
        address: str | None = None,
        cpus: int | None = None,
        gpus: int | None = None,
    ) -> None:
        super().__init__(jobs, students, retries)
        for name, value, least in (("cpus", cpus, 1), ("gpus", gpus, 0)):
            if value is not None and value < least:
                raise BadInput(name, value, f"a number of {name}, at least {least}")
        self.address, self.cpus, self.gpus = address, cpus, gpus

    def check(self) -> None:
        extras.need("ray", "ray")

    @contextmanager
    def open(self, folder: Path, needs: Needs) -> Iterator[Start]:
        import ray

        asked = self.requested(needs)
        os.environ.setdefault(STATISTICS, "0")
        options: dict[str, Any] = {"address": self.address or "local"}  # None would join one that RAY_ADDRESS names
        if self.address is None:
            options |= {"num_cpus": max(asked.cores * (self.jobs or 1), cores()), "include_dashboard": False}
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}  # Ray has its own
        try:
            ray.init(log_to_driver=False, logging_level="error", **options)
        except ConnectionError as error:
            raise BadInput("launcher.address", self.address, f"a running cluster of Ray ({error})") from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        task = ray.remote(num_cpus=asked.cores, num_gpus=asked.gpus, max_retries=0)(_call)
        try:
            yield lambda name, command: Task(task.options(name=name).remote(command))
        finally:
            ray.shutdown()


def _call(command: Command) -> int:
    return command()


class Task:
    """A task of Ray."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference

    def poll(self) -> Outcome | None:
        import ray

        if not ray.wait([self.reference], timeout=0)[0]:
            return None
        try:
            return Outcome(ray.get(self.reference))
        except ray.exceptions.RayTaskError as error:  # raised by the command
            return Outcome(1, " ".join(str(error.cause).split()) or type(error).__name__)
        except ray.exceptions.RayError as error:  # the worker, or its machine, has gone
            return Outcome(KILLED, type(error).__name__)

    def cancel(self) -> None:
        import ray

        ray.cancel(self.reference)
