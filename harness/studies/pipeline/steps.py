"""The seconds of a fit's steps, and who computed what in its last one, taken inside its ranks."""

import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from harness.runs.files import write_json
from harness.studies.hardware.callbacks import Stoppable


class Steps(Stoppable):
    """Times blocks of steps; every rank writes what it found to `rank<r>.json`.

    The file holds `seconds` a step of each block; and of a pipeline the `events` of the last step as (stage,
    micro-batch, kind, start, stop), and `layers`, the stages of those that this rank has computed, by their numbers.

    Args:
        folder: where.
        warmup: steps before the first block.
        batches: steps of a block.
        repeats: blocks.
    """

    def __init__(self, folder: Path, warmup: int, batches: int, repeats: int) -> None:
        self.folder, self.warmup, self.batches, self.repeats = folder, warmup, batches, repeats
        self.step = 0
        self._moments: list[float] = []
        self._called: dict[int, float] = {}

    @property
    def steps(self) -> int:
        """Of the whole fit."""
        return self.warmup + self.batches * self.repeats

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Compute with one thread on a CPU, as many ranks as there may be cores."""
        if trainer.strategy.root_device.type == "cpu":
            torch.set_num_threads(1)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch when layers are called."""
        super().on_train_start(trainer, pl_module)
        stages: Any = pl_module.pipeline_stages
        for number, layer in enumerate(stages()):
            layer.register_forward_hook(partial(self._note, number))

    def _note(self, number: int, *_: Any) -> None:
        self._called[number] = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the time at the end of each block, once GPUs have done what is queued."""
        self.step += 1
        timed = self.step - self.warmup
        if timed >= 0 and timed % self.batches == 0:
            for device in {p.device for p in pl_module.parameters() if p.device.type == "cuda"}:
                torch.cuda.synchronize(device)
            self._moments.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it down."""
        if self.step < self.steps:
            return  # it was stopped
        events: list[Any] = getattr(trainer.strategy, "events", [])
        forwards = [event for event in events if event.kind == "forward"]
        found = {
            "seconds": [(stop - start) / self.batches for start, stop in pairwise(self._moments)],
            "events": events,
            "layers": {
                n: e.stage for n, moment in self._called.items() for e in forwards if e.start <= moment <= e.stop
            },
        }
        write_json(self.folder / f"rank{trainer.global_rank}.json", found)
