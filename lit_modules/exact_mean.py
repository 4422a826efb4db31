"""A mean whose bits don't depend on the order of its samples."""

import torch
from torch import Tensor
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
