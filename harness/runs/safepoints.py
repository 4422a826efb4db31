"""Checkpoints that are whole or absent, from which a run goes on as if it had not been cut off."""

import time
from argparse import Namespace
from collections.abc import Iterable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from harness.runs import signals as interrupts
from apprentice.errors import BadInput
from harness.runs.files import atomic



class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files, written beside their name and renamed when complete and on disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write the checkpoint, all or nothing."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            torch.save(checkpoint, temporary)


class SafePoints(Checkpoint):
    """Keeps one checkpoint: every so many seconds, when the user interrupts, and when training has ended.

    It is written before a batch starts, when all that belongs to the batches before it is done (validation, schedulers,
    logging), so that a run goes on from it exactly. Rank zero has the clock; where any rank is told to stop, all do.

    Args:
        path: the file.
        every: seconds between two writes, and so the most training that is repeated after a crash.
    """

    def __init__(self, path: str | Path, every: float = 30.0) -> None:
        self.path, self.every = Path(path), every
        self.finished, self._saves_on_signal = False, interrupts.deferring()
        self._seconds_before, self._started, self._saved = 0.0, time.monotonic(), time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Seconds of training so far, and whether it has ended."""
        return {"seconds": self.seconds, "finished": self.finished}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from the seconds of the session before."""
        self._seconds_before = state_dict["seconds"]

    @property
    def state_key(self) -> str:
        """The key of this callback's state in the checkpoint."""
        return "SafePoints"

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a resume included."""
        return self._seconds_before + time.monotonic() - self._started

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._started = self._saved = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count batches from those that are done; take over signals, now that Lightning has set its handlers."""
        # After a resume, Lightning takes back the batch that was about to start from the epoch's count alone. By the
        # total one `val_check_interval` counts, where it goes on over epochs.
        trainer.fit_loop.epoch_loop.batch_progress.total.reset_on_restart()
        if self._saves_on_signal:
            interrupts.take_over()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save if it is time; save and leave if the user wants to."""
        if batch_idx % trainer.accumulate_grad_batches:
            return  # gradients of the batches before are not part of a checkpoint
        stop = interrupts.requested()
        late = time.monotonic() - self._saved >= self.every
        stop, late = _agreed(trainer, stop, late and trainer.is_global_zero)
        # For the loggers this is the step's number; Lightning counts one too many after a resume.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        if stop or late:
            for logger in trainer.loggers:
                logger.save()  # what was logged before the checkpoint is not logged again
            trainer.save_checkpoint(self.path)
            self._saved = time.monotonic()
        if stop:
            raise SystemExit(interrupts.SAVED)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end: the process that started the ranks reads the result from here."""
        self.finished = True
        trainer.save_checkpoint(self.path)


def _agreed(trainer: Trainer, *flags: bool) -> list[bool]:
    """For each flag, whether any rank has set it."""
    if trainer.world_size == 1:
        return list(flags)
    shared = torch.tensor(flags, dtype=torch.uint8, device=trainer.strategy.root_device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return [bool(flag) for flag in shared.tolist()]


def read(path: str | Path) -> dict[str, Any]:
    """A checkpoint's content on the CPU; never runs code that a file may hold."""
    return torch.load(path, weights_only=True, map_location="cpu")
