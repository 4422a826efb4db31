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

from apprentice import interrupts
from apprentice.errors import BadInput
from apprentice.files import atomic

Tensors = dict[str, torch.Tensor]
# What files of weights hold beside tensors, and torch takes for code: the settings of a script, and numpy's numbers.
_SCALAR = np.float64(0).__reduce__()[0]
HARMLESS: list[Any] = [
    Namespace, type(Path()), np.dtype, *(type(np.dtype(kind)) for kind in ("float32", "float64", "int64", "bool")),
    *((_SCALAR, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]  # fmt: skip


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


def read_weights(path: str, flag: str) -> Tensors:
    """The state dict in a user's file: bare, or inside a checkpoint, Lightning's or another's.

    Raises:
        BadInput: no such file, not a checkpoint, cut short, or a pickle that would have to run code.
    """
    if not Path(path).is_file():
        raise BadInput(flag, path, "a file of weights; there is none")
    try:
        with torch.serialization.safe_globals(HARMLESS):
            content = read(path)
    except Exception as error:  # noqa: BLE001 - torch.load of a broken file raises whatever its parser meets
        runs_code = "GLOBAL " in str(error)  # a pickle that names a function or class of its own
        why = "cut short or no checkpoint at all" if not runs_code else "more than a state_dict: it would run code"
        raise BadInput(flag, path, f"a file of weights; it is {why}") from None
    for key in ("state_dict", "model_state_dict", "model", "net"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise BadInput(flag, path, "a file of weights; it holds no state dict")
    return content


def load_weights(net: torch.nn.Module, path: str, flag: str) -> None:
    """Load a user's file of weights into a net, which one of the two may have wrapped: `module.`, `model.`.

    Raises:
        BadInput: the file can't be read, or its weights are another net's or no numbers to compute with; the message
            names the first of them.
    """
    weights, own = read_weights(path, flag), net.state_dict()
    name, wrapper = type(net).__name__, _shared(own)
    prefix = _shared(weights).removesuffix(wrapper)
    weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    if not any(key.startswith(wrapper) for key in weights):  # of the bare net
        weights = {wrapper + key: value for key, value in weights.items()}
    unused = tuple(getattr(net, "unused_weights", ()))  # which files of the net's kind hold, and the net does without
    weights = {key: value for key, value in weights.items() if not key.startswith(unused)}
    if missing := [key for key in own if key not in weights]:
        raise BadInput(flag, path, f"weights of {name}; {missing[0]} is missing ({len(missing)} of {len(own)} are)")
    if extra := [key for key in weights if key not in own]:
        raise BadInput(flag, path, f"weights of {name}, which has no {extra[0]} ({len(extra)} more than it has)")
    for key, value in weights.items():
        if value.shape != own[key].shape:
            shapes = f"{key} is {tuple(value.shape)} there and {tuple(own[key].shape)} here"
            raise BadInput(flag, path, f"weights of {name}; {shapes}")
    _check_values(own, weights, path, flag)
    net.load_state_dict(weights)


def fitting(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], path: str, flag: str) -> Tensors:
    """The weights, if they are those that are wanted, no more and no less.

    Raises:
        BadInput: naming every key that does not fit.
    """
    faults = {
        "missing": [key for key in own if key not in weights],
        "unknown": [key for key in weights if key not in own],
        "of another shape": [
            f"{key} {tuple(value.shape)}, not {tuple(own[key].shape)}"
            for key, value in weights.items() if key in own and value.shape != own[key].shape
        ],
    }  # fmt: skip
    if any(faults.values()):
        told = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in faults.items() if keys)
        raise BadInput(flag, path, f"weights that fit the net; {told}")
    _check_values(own, weights, path, flag)
    return dict(weights)


def _check_values(own: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], path: str, flag: str) -> None:
    """Refuse integers and what is not finite where the net has finite floats: a mask of its own may hold infinities."""
    for key, value in weights.items():
        if not own[key].is_floating_point():
            continue
        if not value.is_floating_point():
            raise BadInput(flag, path, f"floats as weights; {key} is {str(value.dtype).removeprefix('torch.')}")
        if spoilt := int((own[key].cpu().isfinite() & ~value.float().isfinite()).sum()):
            raise BadInput(
                flag, path, f"finite weights; {key} has {spoilt} of {value.numel()} that are NaN or infinite"
            )


def _shared(keys: Iterable[str]) -> str:
    """The parts that all keys begin with, as `module.`, or `net.` of a LightningModule around its net."""
    parts = zip(*(key.split(".")[:-1] for key in keys), strict=False)
    return "".join(f"{part[0]}." for part in takewhile(lambda part: len(set(part)) == 1, parts))
