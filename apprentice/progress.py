"""What a user sees of a fit: a bar on a terminal, a quiet line an epoch elsewhere."""

import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


@contextmanager
def quiet() -> Iterator[None]:
    """Inside the block Lightning keeps its advertisements to itself, and what it warns of that is meant to be so."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def progress(label: str) -> dict[str, Any]:
    """A Trainer's arguments for a progress bar if output is a terminal, for lines otherwise."""
    if sys.stderr.isatty():
        return {"callbacks": [TQDMProgressBar(refresh_rate=10)]}
    return {"callbacks": [Lines(label)], "enable_progress_bar": False}


EXPECTED = (
    r"Found \d+ module\(s\) in eval mode",  # the teacher always is
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 against torch 2.15
    r"`weights_only` was not set",  # its way to carry weights from a rank back to this process
    r"The '(train|val|test)_dataloader' does not have many workers",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
)


class Lines(Callback):
    """One line an epoch: loss, and each run's validation accuracy where there is one, else its training accuracy."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._start = time.monotonic()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        self._start = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the line of the epoch that ends."""
        if not trainer.is_global_zero:
            return
        values = trainer.callback_metrics
        tag = "val/acc" if any(name.endswith("val/acc") for name in values) else "train/acc"
        found = {name.removesuffix(tag).rstrip("/"): float(v) for name, v in values.items() if name.endswith(tag)}
        accuracies = "  ".join(f"{name} {value:.4f}".strip() for name, value in found.items())
        loss = f"loss {float(values['loss']):.4f}  " if "loss" in values else ""
        seconds = time.monotonic() - self._start
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        print(f"{self.label}  {epoch}  {seconds:.1f} s  {loss}{tag} {accuracies}", flush=True)
