"""A fit that fails: hooks run in the ranks that have trained, and communicate only where all ranks can."""

import contextlib
import pickle
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from apprentice.errors import BadInput
from strategies.base import missing_ranks
from strategies.base.private import abort_process_group

if TYPE_CHECKING:
    from strategies.base.data_parallel import DataParallel

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


@contextlib.contextmanager
def send_errors(file: Path) -> Iterator[None]:
    """Pickle the block's error for the process that forked this rank; without that, it gets the traceback as text."""
    try:
        yield
    except Exception as error:
        sent = error
        if isinstance(error, BadInput):  # its value may be a function, or a mesh
            sent = BadInput(error.argument, str(error.value), error.expected)
        with contextlib.suppress(Exception):  # not every error can be pickled, and the disk may be full
            file.write_bytes(pickle.dumps(sent))
        raise


def receive(file: Path) -> BaseException | None:
    """Return the error that a rank has sent, or None where it sent none that can be read here."""
    with contextlib.suppress(Exception):
        error = pickle.loads(file.read_bytes())
        return error if isinstance(error, BaseException) else None
    return None


def saves_alone(strategy: "DataParallel", trainer: Trainer) -> bool:
    """Whether this rank saves a checkpoint of a failed fit, whatever has become of the others."""
    has_state = strategy.is_global_zero and (strategy.saves_alone or strategy.world_size == 1)
    return has_state and trainer.state.fn == TrainerFn.FITTING and may_save(trainer)


def prepare_hooks(strategy: "DataParallel", trainer: Trainer, exception: BaseException, ends: bool) -> None:
    """Before Lightning calls `on_exception`: let a rank save by itself, or with all others, or not at all.

    A rank that does not end now may fit again, with the others.
    """
    if not dist.is_initialized() or strategy.world_size == 1 or not may_save(trainer):
        return
    if not (ends and strategy.saves_alone) and is_everywhere(trainer, exception):
        return
    if not strategy.saves_alone:
        set_hooks_aside(strategy, trainer, "callbacks")
        kind = type(strategy).__name__
        exception.add_note(f"on_exception of callbacks was not called: {kind} saves with all ranks or not at all")
        return
    try:
        strategy.raise_for_missing(exception)
    except (TimeoutError, ConnectionError, ValueError, SystemExit) as missing:
        strategy.missing = missing
    # Outside of the process group, metrics and checkpoints wait for nobody.
    abort_process_group() if dist.get_backend() == "nccl" else dist.destroy_process_group()


def set_hooks_aside(strategy: "DataParallel", trainer: Any, *names: str) -> None:
    """Take what Lightning would call from the Trainer's attributes, until the strategy's teardown."""
    for name in names:
        strategy.undo.callback(setattr, trainer, name, getattr(trainer, name))
        setattr(trainer, name, None if name == "datamodule" else [])
