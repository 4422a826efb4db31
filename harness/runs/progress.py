"""What a user sees of a fit: a progress bar on a terminal, a line an epoch elsewhere."""

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar

EXPECTED_WARNINGS = (
    r"Found \d+ module\(s\) in eval mode",  # the teacher always is
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 with torch 2.15
    r"`weights_only` was not set",  # Lightning reads a rank's weights back into this process
    r"The '(train|val|test)_dataloader' does not have many workers",
    r".*joblib will operate in serial mode",  # where /dev/shm can't be written
    r"The number of training batches \(\d+\) is smaller than the logging interval",
)
TAGS = ("val/acc", "val/loss", "train/acc", "train/loss")


@contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's information messages and expected warnings inside the block."""
    wanted = {"lightning.pytorch": "WARNING", "lightning.fabric": "WARNING", "torch.multiprocessing.spawn": "ERROR"}
    loggers = [logging.getLogger(name) for name in wanted]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        warnings.filterwarnings("ignore", module=r"lit_modules\.nets\.attention$")  # the refusal has torch's reasons
        for logger, name in zip(loggers, wanted.values(), strict=True):
            logger.setLevel(name)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def progress(label: str) -> dict[str, Any]:
    """A Trainer's arguments for a progress bar if stderr is a terminal, for lines otherwise."""
    if sys.stderr.isatty():
        return {"callbacks": [TQDMProgressBar(refresh_rate=10)]}
    return {"callbacks": [Lines(label)], "enable_progress_bar": False}


class Lines(Callback):
    """Prints a line an epoch, or a validation where steps are counted: the loss, and each run's accuracy or loss."""

    def __init__(self, label: str) -> None:
        self.label, self._start = label, time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        if trainer.max_epochs != -1 or not trainer.current_epoch:
            self._start = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line of the steps so far."""
        if trainer.max_epochs == -1 and not trainer.sanity_checking:
            self._print(trainer, f"step {trainer.global_step}/{trainer.max_steps}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the epoch's line."""
        if trainer.max_epochs != -1:
            self._print(trainer, f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}")

    def _print(self, trainer: Trainer, done: str) -> None:
        values = trainer.callback_metrics
        tag = next((tag for tag in TAGS if any(name.endswith(tag) for name in values)), TAGS[-1])
        found = {name.removesuffix(tag).rstrip("/"): float(v) for name, v in values.items() if name.endswith(tag)}
        shown = "  ".join(f"{name} {value:.4f}".strip() for name, value in found.items())
        loss = f"loss {float(values['loss']):.4f}  " if "loss" in values else ""
        if trainer.is_global_zero:
            print(f"{self.label}  {done}  {time.monotonic() - self._start:.1f} s  {loss}{tag} {shown}", flush=True)
