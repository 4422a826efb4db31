"""Evaluation scores, which count each sample once on any number of ranks."""

import torch
from torch import Tensor, nn
from torchmetrics import Metric

UNIT = 2.0**32


class ExactMean(Metric):
    """Mean of per-sample values, summed in integers: whole parts, and fractions in units of 2**-32.

    Each value is rounded to 2e-10; a value that is not finite or above 2**53 makes the mean NaN.
    """

    whole: Tensor
    fraction: Tensor
    samples: Tensor
    broken: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("whole", "fraction", "samples", "broken"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add b samples: values (b,)."""
        values = values.detach().double()
        usable = values.abs() <= 2.0**53
        values = values.where(usable, 0.0)
        floor = values.floor()
        self.whole += floor.long().sum()
        self.fraction += ((values - floor) * UNIT).round().long().sum()
        self.samples += len(values)
        self.broken += (~usable).sum()

    def compute(self) -> Tensor:
        """The mean, a float64 scalar."""
        mean = (self.whole.double() + self.fraction.double() / UNIT) / self.samples
        return mean.where(self.broken == 0, torch.nan)


class Scores(nn.Module):
    """The scores of one run."""

    names: tuple[str, ...]  # of the values in a test's result, the most important first
    trained: tuple[str, ...]  # of the values that training logs beside the loss, as `per_label` has them
    sampled: tuple[str, ...] = ()  # of the values of a single sample in a test

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add b samples: logits (b, ..., classes), labels (b, ...)."""
        raise NotImplementedError

    def compute(self) -> dict[str, Tensor]:
        """Values over all ranks, including those of `names`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Start from zero."""
        for metric in self.children():
            metric.reset()  # type: ignore[operator]

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        """Values (b, ...) by name in `trained`, whose means are logged; `ce` are cross-entropies, if known already."""
        raise NotImplementedError

    def of_sample(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Values (b,) by name in `sampled` of logits (b, ..., classes) and labels (b, ...)."""
        return {}

    def confusion_matrix(self) -> Tensor | None:
        """Counts (classes, classes) over all ranks with the truth in rows, if there are classes to confuse."""
        return None
