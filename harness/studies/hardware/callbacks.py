"""Callbacks that measure a fit from inside its ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.optim import Optimizer

from harness.runs.files import write_json
from harness.studies.isolation import Stoppable
from harness.studies.meters import Overlap, PeakMemory, Stamps, sent_bytes, state_bytes


class Phases(NamedTuple):
    """The phases of a measured fit in their order, in batches."""

    warmup: int  # not measured
    block: int  # timed together: a whole period of a strategy that acts every few steps
    blocks: int  # the number of these; their bytes are counted
    profiled: int  # watched by a profiler, which slows them down

    @classmethod
    def of(cls, options: Mapping[str, Any], steps: int, accumulate: int = 1) -> "Phases":
        """Phases for a strategy with these options, of at least so many optimizer steps of `accumulate` batches.

        `period` is the number of steps between its actions, `start_step` and `warmup_steps` are steps before the first.
        """
        period = options.get("period") or 1
        starting = (options.get("start_step") or 0) + (options.get("warmup_steps") or 0)
        blocks = max(-(-steps // period), 3)
        return cls((4 + starting) * accumulate, period * accumulate, blocks, 3 * accumulate)

    @property
    def timed(self) -> int:
        """Batches in all blocks."""
        return self.block * self.blocks

    @property
    def batches(self) -> int:
        """Batches of the whole fit."""
        return self.warmup + self.timed + self.profiled


class Measure(Stoppable):
    """Every rank writes `rank<r>.json` into the folder.

    It holds the `seconds` of each block, bytes `sent` in all blocks, bytes of `state`, bytes of `peak` memory until the
    blocks end, the share of communication that was `hidden`, and the number of `threads`.
    """

    def __init__(self, folder: Path, phases: Phases) -> None:
        self.folder, self.phases = folder, phases
        self.batch = 0
        self.found: dict[str, Any] = {"hidden": None}
        self._sent: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the meters with weights of this rank's own: a fork shares its parent's."""
        device = trainer.strategy.root_device
        self._stamps, self._memory = Stamps(device), PeakMemory(device)
        pl_module._apply(torch.clone)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Mark the time; the interval to the next call is a whole step."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        timed = self.batch - self.phases.warmup
        self.batch += 1
        if timed == 0:
            self._sent = sent_bytes()
        if 0 <= timed <= self.phases.timed and timed % self.phases.block == 0:
            self._stamps.mark()
        if timed == self.phases.timed:
            before, now = self._sent, sent_bytes()
            self.found["sent"] = None if before is None or now is None else now - before
            self.found["peak"] = self._memory.bytes()
            if trainer.world_size > 1:
                self._overlap = Overlap(trainer.strategy.root_device)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count the state: gradients are there and sharded ones are cut; from the second step on, moments, too."""
        if self.batch <= self.phases.warmup:
            self.found["state"] = state_bytes(pl_module, trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file."""
        if self.batch < self.phases.batches:
            return  # training has stopped itself: its figures would mislead
        if trainer.world_size > 1:
            self.found["hidden"] = self._overlap.share()
        self.found |= {"seconds": self._stamps.seconds(), "threads": torch.get_num_threads()}
        write_json(self.folder / f"rank{trainer.global_rank}.json", self.found)


class KeepWeights(Stoppable):
    """Writes the weights after so many steps, in the layout of one device."""

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps = path, steps

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the weights from all ranks; rank zero writes them, unless training has stopped itself."""
        weights = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero and trainer.global_step == self.steps:
            torch.save(weights, self.path)
