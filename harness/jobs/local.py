"""Jobs as processes on this machine."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from datamodules.streams import cores
from harness.jobs.base import Launcher, Needs, Outcome, Start
from harness.jobs.command import Command

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Local(Launcher):
    """Processes on this machine, as many as it has cores for; on GPUs, each job has some for itself."""

    def limit(self, needs: Needs) -> int:
        return self.jobs or max(1, len(_list_gpus()) // needs.gpus if needs.gpus else cores() // needs.cores)

    @contextmanager
    def open(self, folder: Path, needs: Needs) -> Iterator[Start]:
        gpus, size = _list_gpus() if needs.gpus else [], max(needs.gpus, 1)
        places = [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
        users: dict[str, list[subprocess.Popen[bytes]]] = {place: [] for place in places}

        def start(_: str, command: Command) -> Process:
            if not users:
                return Process(command.start())
            place = min(users, key=lambda place: sum(process.poll() is None for process in users[place]))
            users[place].append(command.start(**{VISIBLE: place}))
            return Process(users[place][-1])

        yield start


class Process:
    """A child of this process."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def poll(self) -> Outcome | None:
        code = self.process.poll()
        return None if code is None else Outcome(code)

    def cancel(self) -> None:
        self.process.terminate()


def _list_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    visible = os.environ.get(VISIBLE)
    return [*map(str, range(torch.cuda.device_count()))] if visible is None else [*filter(None, visible.split(","))]
