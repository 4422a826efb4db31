"""Jobs as tasks of Ray."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from apprentice import extras
from apprentice.errors import BadInput
from datamodules.streams import cores
from harness.jobs.base import KILLED, Needs, Outcome, Running, Scheduler, Start
from harness.jobs.command import Command

# Ray has its own variables; this one, set to "0", keeps it from sending usage statistics.
STATISTICS = "RAY_USAGE_STATS_ENABLED"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ray(Scheduler):
    """Tasks of a Ray cluster: of a running one, or of one that is started on this machine for this run.

    Args:
        address: of a running cluster, as HOST:PORT, or auto; by default one is started.
        options: `jobs` and others of all launchers, `cpus` and `gpus`.
    """

    def __init__(self, address: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.address = address

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

        def start(name: str, command: Command) -> Running:
            reference = task.options(name=name).remote(command)
            return Running(partial(_poll, reference), partial(ray.cancel, reference))

        try:
            yield start
        finally:
            ray.shutdown()


def _call(command: Command) -> int:
    return command()


def _poll(reference: Any) -> Outcome | None:
    import ray

    if not ray.wait([reference], timeout=0)[0]:
        return None
    try:
        return Outcome(ray.get(reference))
    except ray.exceptions.RayTaskError as error:  # raised by the command
        return Outcome(1, " ".join(str(error.cause).split()) or type(error).__name__)
    except ray.exceptions.RayError as error:  # the worker, or its machine, has gone
        return Outcome(KILLED, type(error).__name__)
