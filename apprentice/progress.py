"""What a user sees of a fit: a bar on a terminal, a quiet line an epoch elsewhere."""

import sys
import time

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar


def progress(label: str) -> Callback:
    """A progress bar if output is a terminal, lines otherwise."""
    return TQDMProgressBar(refresh_rate=10) if sys.stderr.isatty() else Lines(label)


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
        accuracies = " ".join(f"{name} {value:.4f}".strip() for name, value in found.items())
        loss = f"loss {float(values['loss']):.4f}  " if "loss" in values else ""
        seconds = time.monotonic() - self._start
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        print(f"{self.label}  {epoch}  {seconds:.1f} s  {loss}{tag} {accuracies}", flush=True)  # noqa: T201
