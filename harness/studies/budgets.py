"""A student's time: how many of its own training steps fit into so many seconds on this machine."""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from apprentice.batch import Batch
from datamodules import InMemoryData
from harness.runs.quiet import notice
from harness.studies.costs import alone, milliseconds
from lit_modules.learner import Learner


class StudentBudget(Callback):
    """Stops each run after the steps that fit into its seconds; a checkpoint keeps how many these are.

    A step is forward, loss and backward of the run alone, timed on rank zero before training: what runs share, such as
    the teacher's outputs, costs none of them time, and none waits for another.

    Args:
        seconds: of each run.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.steps = dict(state_dict["steps"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Time a step of each run, unless a checkpoint has the numbers."""
        module = cast("Learner", pl_module)
        if not self.steps:
            steps = self._count_steps(trainer, module) if trainer.is_global_zero else {}
            self.steps = trainer.strategy.broadcast(steps)

    def _count_steps(self, trainer: Trainer, module: Learner) -> dict[str, int]:
        data = cast("InMemoryData", trainer.datamodule)  # type: ignore[attr-defined]
        rows = torch.arange(min(data.batch_size, data.sizes["train"]))
        inputs, labels = (x.to(module.device) for x in data.samples("train", rows, cast("torch.dtype", module.dtype)))
        steps = {}
        for run in module.runs:
            with trainer.precision_plugin.forward_context(), alone(module.device):
                step_ms = milliseconds(module.step_alone(run, Batch.of((inputs, labels), 0, shared=False)))
            batches = max(math.floor(self.seconds * 1000 / step_ms), 1)
            steps[run] = max(batches // trainer.accumulate_grad_batches, 1)
            notice(f"{run}: {self.seconds:g} s are {steps[run]} steps of {step_ms:.3g} ms")
        return steps

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Stop before a step too many: after a batch, callbacks come before averages of the weights and its count."""
        module = cast("Learner", pl_module)
        for run in module.active_runs:
            if trainer.global_step >= self.steps[run]:
                module.stop(run)
