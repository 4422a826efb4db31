"""Jobs as processes on this machine."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from datamodules.streams import cores
from harness.jobs.base import Engine, Needs, Outcome, Running, Start
from harness.jobs.command import Command

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Local(Engine):
    """Processes on this machine, as many as it has cores for; on GPUs, each job has some for itself.

    They are no jobs of submitit's LocalExecutor: those go on if the process that started them is killed, and have one
    second to save when they are cancelled.
    """

    def limit(self, needs: Needs) -> int:
        return self.jobs or max(1, len(_list_gpus()) // needs.gpus if needs.gpus else cores() // needs.cores)

    @contextmanager
    def open(self, folder: Path, needs: Needs) -> Iterator[Start]:
        gpus, size = _list_gpus() if needs.gpus else [], max(needs.gpus, 1)
        places = [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
        users: dict[str, list[subprocess.Popen[bytes]]] = {place: [] for place in places}

        def start(_: str, command: Command) -> Running:
            if not users:
                process = command.start()
            else:
                place = min(users, key=lambda place: sum(process.poll() is None for process in users[place]))
                process = command.start(**{VISIBLE: place})
                users[place].append(process)
            return Running(partial(_poll, process), process.terminate)

        yield start


def _poll(process: "subprocess.Popen[bytes]") -> Outcome | None:
    code = process.poll()
    return None if code is None else Outcome(code)


def _list_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    visible = os.environ.get(VISIBLE)
    return [*map(str, range(torch.cuda.device_count()))] if visible is None else [*filter(None, visible.split(","))]
