"""Floating-point operations of a whole training: those of each batch that a net has learned from, by its size."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from apprentice.batch import Batch
from datamodules.base import InMemoryData
from datamodules.batch_shapes import BatchShapes
from harness.studies.operations import flops
from lit_modules.training.loop import Loop

Step = Callable[[], Tensor]


class LearnedBatches(NamedTuple):
    """The n batches that a run has learned from."""

    shapes: BatchShapes
    epochs: Tensor  # (n,) int64, the epoch of each
    numbers: Tensor  # (n,) int64, its place in the epoch
    samples: int  # in all of them: as many as the shapes have, unless a loader of the user's cuts other batches

    @classmethod
    def of(cls, data: InMemoryData, samples: int) -> "LearnedBatches":
        """Return the first batches with so many samples, in the order of the data module's last Trainer."""
        epochs, left = list[BatchShapes](), samples
        while left > 0:
            epochs.append(data.batch_shapes(len(epochs)))
            left -= int(epochs[-1].samples.sum())
        shapes, sizes = BatchShapes.cat(epochs), torch.tensor([len(of_epoch.rows) for of_epoch in epochs])
        kept = shapes.samples.cumsum(0) - shapes.samples < samples
        numbers = torch.cat([torch.arange(size) for size in sizes.tolist()])
        return cls(shapes.select(kept), torch.arange(len(sizes)).repeat_interleave(sizes)[kept], numbers[kept], samples)

    def phases(self, starts: Collection[float], planned: float) -> Tensor:
        """Return (n,) int64, the phase of each batch, of those that begin at these shares of the planned batches."""
        progress = torch.arange(len(self.epochs)).double() / planned
        return torch.searchsorted(torch.tensor([*starts], dtype=torch.float64), progress, right=True) - 1

    def shares(self, steps: Mapping[float, Step], planned: float) -> list[tuple[Step, float]]:
        """Return the steps of phases, by their beginnings, that have batches, and the share of all that each has."""
        counts = self.phases(steps, planned).bincount(minlength=len(steps)).tolist()
        return [(step, n / sum(counts)) for step, n in zip(steps.values(), counts, strict=True) if n]

    def of_all_samples(self, operations: float) -> int:
        """Return the operations on all samples, given those on the shapes' samples."""
        return round(operations * self.samples / int(self.shapes.samples.sum()))


def count_training(module: Loop, run: str, batch: Batch, trained: LearnedBatches) -> int | None:
    """Count the operations of a run's training on rows of one size; `batch` is one of the data's.

    None where an operator has no formula: see `count_operations`.
    """
    steps, total = module.timed_steps(run, batch), 0.0
    phases = trained.phases(steps, module.batches_planned)
    for phase, step in enumerate(steps.values()):
        rows = int(trained.shapes.rows[phases == phase].sum())
        if not rows:
            continue
        if (counted := flops(step)) is None:
            return None
        total += rows * (counted / len(batch.inputs))
    return trained.of_all_samples(total)
