"""Responses that a student writes for the prompts of several steps at once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from apprentice.batch import Batch
from lit_modules.nets.generation import Generated
from lit_modules.text.generations import generate_across_ranks

if TYPE_CHECKING:
    from lit_modules.distillation import Distillation

ROWS = 32  # that are written at once
WindowResponses = dict[str, Any]  # as a checkpoint holds them: the weights that wrote them are gone


def step_keys(loop: "Distillation") -> tuple[int, int]:
    """Return the keys of the optimizer's step: the epoch, and the step in it."""
    epoch, batch = batch_in_epoch(loop)
    return epoch, batch // batches_of_step(loop)


def batch_in_epoch(loop: "Distillation") -> tuple[int, int]:
    """Return the epoch, and the number of the next batch in it."""
    done, epoch = loop.batches_done, loop.epoch_batches
    return (0, done) if math.isinf(epoch) else divmod(done, int(epoch))


def batches_of_step(loop: "Distillation") -> int:
    """Return how many batches a step of the optimizer is of."""
    return 1 if loop.attached_trainer is None else loop.attached_trainer.accumulate_grad_batches


@dataclass(frozen=True)
class Window:
    """Steps of an epoch for which a student writes with its weights of one of them, the first in which it learns so.

    Args:
        epoch: its number.
        steps: of the optimizer, in this window.
        step_batches: batches of a step.
        epoch_batches: batches of the epoch.
    """

    epoch: int
    steps: range
    step_batches: int
    epoch_batches: int

    @property
    def key(self) -> list[int]:
        return [self.epoch, self.steps.start]

    def batches(self, steps: Sequence[int]) -> list[tuple[int, int]]:
        """Return the batches of some steps: each one's step, and its number in the epoch."""
        of_step, last = self.step_batches, self.epoch_batches
        return [(s, number) for s in steps for number in range(s * of_step, min((s + 1) * of_step, last))]


def write_ahead(
    window: Window,
    steps: Sequence[int],
    trainer: Trainer,
    write: Callable[[Batch, Tensor], Generated],
    width: int,
) -> WindowResponses:
    """Let a student write for some steps of a window; collective.

    Rows are written so many at a time whatever the number of processes, so texts do not depend on it.

    Args:
        window: the steps that belong together.
        steps: those of them in which the student learns from its own texts.
        trainer: whose data module has texts that are the same in each epoch.
        write: rows, and the step (b,) of each, to what the student writes.
        width: new tokens of a response at most.
    """
    data: Any = getattr(trainer, "datamodule", None)
    order, size, device = data.order_of(window.epoch), data.batch_size, trainer.strategy.root_device
    parts = {number: (s, order[number * size : (number + 1) * size]) for s, number in window.batches(steps)}
    index = torch.cat([places for _, places in parts.values()])
    of_step = torch.cat([torch.full((len(places),), s) for s, places in parts.values()])

    def rows(chosen: Tensor) -> Generated:
        inputs, labels = data.samples("train", index[chosen])
        batch = Batch.of((inputs.to(device), labels.to(device)), 0, shared=False)
        return write(batch._replace(index=index[chosen].to(device)), of_step[chosen])

    written = generate_across_ranks(len(index), ROWS, width, device, rows)
    starts, first = dict[int, int](), 0
    for number, (_, places) in parts.items():
        starts[number], first = first, first + len(places)
    return {"window": window.key, "starts": starts, **written._asdict()}


def responses_of_rows(written: WindowResponses, number: int, rows: Tensor) -> Generated:
    """Return what was written for rows (b,) of the global batch of this number in the epoch."""
    places = written["starts"][number] + rows
    return Generated(*(written[what].to(rows.device)[places] for what in Generated._fields))
