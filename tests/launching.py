"""What the tests of launchers share: callbacks, by import path, that end ranks at a certain step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from apprentice import interrupts


class Fault(Callback):
    """Does something once before a step of the teacher's fit, in the ranks of a node; a file remembers that.

    Args:
        mark: the file.
        step: how many steps are done by then.
        rank: the number of the rank, or any.
        world_size: how many ranks there are, or any number.
        node: what the environment variable NODE says on that node.
    """

    def __init__(
        self, mark: str, step: int = 3, rank: int | None = None, world_size: int | None = None, node: str = ""
    ) -> None:
        self.mark, self.step, self.rank, self.world_size, self.node = Path(mark), step, rank, world_size, node

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        here = self.rank in {None, trainer.global_rank} and self.world_size in {None, trainer.world_size}
        here = here and self.node == os.environ.get("NODE", "") and module.runs == [""]
        if here and trainer.global_step == self.step and not self.mark.exists():
            self.mark.touch()
            self.happen()

    def happen(self) -> None:
        raise NotImplementedError


class Killed(Fault):
    """The rank is killed."""

    def happen(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Left(Fault):
    """The rank is killed, and what has started it, as on a node that loses its power."""

    def happen(self) -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


class Held(Fault):
    """The rank waits until it is told to stop, as it is when a node joins."""

    def happen(self) -> None:
        while not interrupts.requested():
            time.sleep(0.02)
