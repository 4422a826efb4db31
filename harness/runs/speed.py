"""The cost of a fit in its log: samples a second, and memory."""

import resource
import sys
import time
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_modules.run_metrics import RunMetrics


class Speed(Callback):
    """Logs `train/samples_per_sec`, of training without validation, and `train/peak_memory_mib`, of rank zero.

    This is no part of the modules, whose logs are the same on any machine.
    """

    def __init__(self) -> None:
        self._step = 0  # at which it logged last

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, also in mid-epoch."""
        self._start(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock again."""
        self._start(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock again."""
        self._start(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log the speed since the last reading."""
        module, step = cast("RunMetrics", pl_module), trainer.global_step
        if trainer.loggers and step != self._step and module.is_logged(step):
            seconds, samples = time.perf_counter() - self._since, module.samples - self._samples
            values = {"train/samples_per_sec": samples / seconds, "train/peak_memory_mib": peak_memory(module.device)}
            module.log_dict(values, batch_size=1)
            self._step = step
            self._start(module)

    def _start(self, module: LightningModule) -> None:
        self._since, self._samples = time.perf_counter(), cast("RunMetrics", module).samples


def peak_memory(device: torch.device) -> float:
    """Return the peak MiB of tensors on a GPU; on the CPU, the peak resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20
