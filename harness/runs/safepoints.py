"""Checkpoints, written whole or not at all, from which a fit resumes to the same bits."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from apprentice.errors import BadInput
from apprentice.weights import read_saved
from harness.runs import signals
from harness.runs.files import atomic
from lit_modules.run_callbacks import BestEpoch, best_weights
from lit_modules.training.loop import Loop

EXPECTED = "a checkpoint of this fit, or no such file, and it starts again"
# What a fit resumes from, of what Lightning writes.
NEEDED = {
    "state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step", "pytorch-lightning_version",
}  # fmt: skip


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints through a temporary file."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with atomic(path) as temporary:
            torch.save(checkpoint, temporary)


class SafePoints(Checkpoint):
    """Keeps one checkpoint, written every so many seconds, when the user interrupts and at the end of training.

    It is written before a batch starts, after the validation, scheduler steps and logging of the batches before, so
    that a resumed fit continues exactly. Rank zero keeps the time; a signal to any rank stops all.
    """

    def __init__(self, path: str | Path, every: float = 30.0) -> None:
        self.path, self.every = Path(path), every
        self.finished, self._saves_on_signal = False, signals.State.deferring
        self._max_epochs: int | None = None
        self._epochs: float | None = None  # after which training ended
        self._seconds_before, self._started, self._saved = 0.0, time.monotonic(), time.monotonic()

    def state_dict(self) -> dict[str, Any]:
        """Return seconds of training over all sessions, whether it has finished, and epochs: planned and trained."""
        seconds = self._seconds_before + time.monotonic() - self._started
        of_epochs = {"max_epochs": self._max_epochs, "epochs": self._epochs}
        return {"seconds": seconds, "finished": self.finished, **of_epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds_before = state_dict["seconds"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = self._saved = time.monotonic()
        self._max_epochs = trainer.max_epochs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Correct the batch count of a resumed fit; install our signal handlers over Lightning's."""
        # After a resume, Lightning subtracts the batch that was about to start from the epoch's count only; a
        # `val_check_interval` over several epochs counts by the total.
        trainer.fit_loop.epoch_loop.batch_progress.total.reset_on_restart()
        if self._saves_on_signal:
            signals.take_over()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Save if it is time or the user asked to stop; then stop."""
        if batch_idx % trainer.accumulate_grad_batches:
            return  # a checkpoint has no accumulated gradients
        late = trainer.is_global_zero and time.monotonic() - self._saved >= self.every
        agreed = [signals.State.requested is not None, late]
        if trainer.world_size > 1:
            shared = torch.tensor(agreed, dtype=torch.uint8, device=trainer.strategy.root_device)
            dist.all_reduce(shared, dist.ReduceOp.MAX)
            agreed = shared.bool().tolist()
        stop, late = agreed
        # Loggers take this as the step; Lightning counts one too many after a resume.
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        if stop or late:
            for logger in trainer.loggers:
                logger.save()  # a resumed fit does not log it again
            trainer.save_checkpoint(self.path)
            self._saved = time.monotonic()
        if stop:
            raise SystemExit(signals.SAVED)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the result for the process that started the ranks."""
        self.finished = True
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.completed
        self._epochs = round(batches / trainer.num_training_batches, 3)
        trainer.save_checkpoint(self.path)


class Until(Callback):
    """Ends a fit after an epoch, under the schedule of all its epochs; a checkpoint of its end goes on behind it."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lift the least number of epochs and steps that the user has set."""
        trainer.fit_loop.min_epochs, trainer.fit_loop.epoch_loop.min_steps = 0, 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch + 1 >= self.epoch:
            trainer.should_stop = True


def read(path: str | Path) -> dict[str, Any]:
    """Read a fit's checkpoint onto the CPU; code in the file is never run.

    Raises:
        BadInput: the file is damaged, or is no checkpoint of ours.
    """
    content = read_saved(path, "out", EXPECTED)
    try:
        whole = content.keys() >= NEEDED and "fit_loop" in content["loops"] and isinstance(content["global_step"], int)
        whole = whole and {"seconds", "finished", "max_epochs", "epochs"} <= content["callbacks"]["SafePoints"].keys()
    except (AttributeError, KeyError, TypeError):
        whole = False
    if not whole:
        raise BadInput("out", path, f"{EXPECTED}; it holds something else")
    return content


def best_of(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return what `BestEpoch` keeps in a checkpoint, by run; nothing where there is none."""
    best: Mapping[str, Mapping[str, Any]] = state["callbacks"].get(BestEpoch.__name__, {}).get("best", {})
    return best


def load(module: LightningModule, state: dict[str, Any], path: str | Path, best: bool = False) -> None:
    """Load a checkpoint into its module, with weights of the best epochs or the last; BadInput if it is another's."""
    try:
        weights = best_weights(best_of(state), module.runs) if best and isinstance(module, Loop) else {}
        module.load_state_dict({**state["state_dict"], **weights})
        module.on_load_checkpoint(state)
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        cause = " ".join(str(error).split())[:200]
        raise BadInput("out", path, f"{EXPECTED}; it is of another module ({type(error).__name__}: {cause})") from error
