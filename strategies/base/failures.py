"""A fit that fails: hooks run in the ranks that have trained, and communicate only where all ranks can."""

import contextlib
import pickle
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from apprentice.errors import BadInput
from strategies.base import missing_ranks
from strategies.base.private import abort_process_group

PATIENCE = 5.0  # seconds until a rank has failed alone


def may_save(trainer: Trainer) -> bool:
    """Whether a callback has an `on_exception`, which may save a checkpoint."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    hooks = [callback for callback in callbacks if type(callback).on_exception is not Callback.on_exception]
    return any(callback.save_on_exception if isinstance(callback, ModelCheckpoint) else True for callback in hooks)


def is_everywhere(trainer: Trainer, exception: BaseException) -> bool:
    """Whether all ranks have failed in the same line of the same step, and so can go on communicating; collective."""
    if isinstance(exception, KeyboardInterrupt) or missing_ranks.SIGNS.search(str(exception)):
        return False
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(exception.__traceback__)]
    place = repr((type(exception).__name__, trainer.global_step, lines))
    responses = missing_ranks.exchange("failed", place, PATIENCE) or {}
    return [*responses.values()] == [place] * dist.get_world_size()


def leave() -> None:
    """Leave the process group, so that metrics and checkpoints wait for nobody."""
    if dist.get_backend() == "nccl":
        abort_process_group()
    else:
        dist.destroy_process_group()


def send(error: BaseException, file: Path) -> None:
    """Pickle a rank's error for the process that forked it; without that, it gets the traceback as text."""
    if isinstance(error, BadInput):  # its value may be a function, or a mesh
        error = BadInput(error.argument, str(error.value), error.expected)
    with contextlib.suppress(Exception):  # not every error can be pickled, and the disk may be full
        file.write_bytes(pickle.dumps(error))


@contextlib.contextmanager
def send_errors(file: Path) -> Iterator[None]:
    """Send the error that the block raises: see `send`."""
    try:
        yield
    except Exception as error:
        send(error, file)
        raise


def receive(file: Path) -> BaseException | None:
    """Return the error that a rank has sent, or None where it sent none that can be read here."""
    with contextlib.suppress(Exception):
        error = pickle.loads(file.read_bytes())
        return error if isinstance(error, BaseException) else None
    return None


@dataclass
class Hooks:
    """Sets aside what Lightning calls when a fit has failed, until `restore`."""

    trainer: Any
    callbacks: list[Any]
    loggers: list[Any]
    data: Any

    @classmethod
    def set_aside(cls, trainer: Any, callbacks_only: bool = False) -> "Hooks":
        """Take the callbacks from a Trainer, and its loggers and data module."""
        hooks = cls(trainer, trainer.callbacks, trainer.loggers, trainer.datamodule)
        trainer.callbacks = []
        if not callbacks_only:
            trainer.loggers, trainer.datamodule = [], None
        return hooks

    def restore(self) -> None:
        """Give them back."""
        self.trainer.callbacks, self.trainer.loggers, self.trainer.datamodule = self.callbacks, self.loggers, self.data
