"""Callbacks that measure a fit from inside its ranks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from harness.runs import signals as interrupts
from harness.runs.files import write_json
from harness.studies.hardware.overlap import Overlap
from harness.studies.meters import PeakMemory, Stamps, sent_bytes, state_bytes


class Plan(NamedTuple):
    """What happens in which batch of a measured fit, in this order; all are numbers of batches.

    Attributes:
        warmup: not measured.
        block: timed together: the batches after which all that a strategy does now and then has been done once.
        blocks: so many are timed, and their bytes counted.
        profiled: watched by a profiler, which slows them down.
    """

    warmup: int
    block: int
    blocks: int
    profiled: int

    @classmethod
    def of(cls, options: Mapping[str, Any], steps: int, accumulate: int = 1) -> "Plan":
        """A plan for a strategy with these options.

        Args:
            options: the strategy's; `period` is a number of steps after which it starts over, `start_step` and
                `warmup_steps` are steps until it does what it is there for.
            steps: optimizer steps to be timed at least.
            accumulate: batches a step.
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


class Stoppable(Callback):
    """Ends the fit at the next batch once the user wants to stop: only there no rank waits for another."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over signals, now that Lightning has set its handlers."""
        if interrupts.deferring():
            interrupts.take_over()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Stop, if that is wanted."""
        interrupts.stop_if_requested()


class Measure(Stoppable):
    """Measures by a plan; every rank writes what it found to `rank<r>.json`.

    The file holds `seconds` of each block, `sent` bytes in all blocks, `state` bytes, `peak` bytes of memory until the
    blocks' end, the share of communication that was `hidden`, and the number of `threads`.

    Args:
        folder: where.
        plan: what and when.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.batch = 0
        self.found: dict[str, Any] = {"hidden": None}
        self._sent: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start from a known memory: with weights of this rank's own, as it shares those it was forked with."""
        device = trainer.strategy.root_device
        self._stamps, self._memory = Stamps(device), PeakMemory(device)
        pl_module._apply(torch.clone)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note the time, or begin or end something; the interval to the next call is a whole step."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        timed = self.batch - self.plan.warmup
        self.batch += 1
        if timed == 0:
            self._sent = sent_bytes()
        if 0 <= timed <= self.plan.timed and timed % self.plan.block == 0:
            self._stamps.mark()
        if timed == self.plan.timed:
            self._end_blocks(trainer)

    def _end_blocks(self, trainer: Trainer) -> None:
        before, now = self._sent, sent_bytes()
        self.found["sent"] = None if before is None or now is None else now - before
        self.found["peak"] = self._memory.bytes()
        if trainer.world_size > 1:
            self._overlap = Overlap(trainer.strategy.root_device)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count the state: here all gradients are there and sharded ones are cut; from the second step on, moments."""
        if self.batch <= self.plan.warmup:
            self.found["state"] = state_bytes(pl_module, trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it down."""
        if self.batch < self.plan.batches:
            return  # training has stopped itself; what there is would mislead
        if trainer.world_size > 1:
            self.found["hidden"] = self._overlap.share()
        self.found |= {"seconds": self._stamps.seconds(), "threads": torch.get_num_threads()}
        write_json(self.folder / f"rank{trainer.global_rank}.json", self.found)


class KeepWeights(Stoppable):
    """Writes the weights at the end of a fit, in the layout of one device.

    Args:
        path: the file.
        steps: after which training ends, unless it has stopped itself.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps = path, steps

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect the weights from all ranks; rank zero writes them."""
        weights = trainer.strategy.lightning_module_state_dict()
        if trainer.is_global_zero and trainer.global_step == self.steps:
            torch.save(weights, self.path)
