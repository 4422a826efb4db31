"""A rank's share of a global batch, with what a loss needs to be the same on any number of devices."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apprentice import replicas

HIDDEN = -1  # in place of a label that training must not see


class Partners(NamedTuple):
    """The samples that a batch's are to be mixed with, one for each."""

    inputs: Tensor  # (b, ...), as the batch's
    labels: Tensor  # (b,)
    index: Tensor  # type: ignore[assignment]  # (b,), their places in the data set


class Mixed(NamedTuple):
    """The second label of mixed samples, whose loss is `share` of that with the first and the rest with the second."""

    labels: Tensor  # (b,) int64
    share: Tensor  # (b,) of the first sample

    def mean(self, first: Tensor, second: Tensor) -> Tensor:
        """(b,) means of values for the first and the second labels."""
        return second + self.share.to(first.dtype) * (first - second)


class Batch(NamedTuple):
    """The b rows that this rank sees of a global batch of `count` rows; b may be 0."""

    inputs: Tensor  # (b, ...), such as uint8 images (b, C, H, W), their normalised floats, or token numbers (b, T)
    labels: Tensor  # (b,) int64, or (b, T) with a label for each token
    index: Tensor  # type: ignore[assignment]  # (b,) int64, each sample's place in its data set; shadows tuple.index
    rows: Tensor  # (b,) int64, each sample's row in the global batch
    count: int  # type: ignore[assignment]  # rows in the global batch
    replicas: int  # number of ranks that gradients are averaged over, without parameter servers
    step: int  # number of this global batch since training began
    label_weight: float | None = None  # None if no label is HIDDEN; else rows of the global batch for each labelled one
    mixed: Partners | Mixed | None = None  # what the samples are to be mixed with, or were

    @classmethod
    def of(cls, batch: "Batch | Sequence[Tensor]", step: int, shared: bool = True) -> "Batch":
        """The batch itself, or one made of a plain (inputs, labels) pair from any DataLoader.

        With `shared`, the pairs of all ranks form one global batch; otherwise each rank's pair is a batch of its own.
        """
        if isinstance(batch, cls):
            return batch
        inputs, labels = batch  # type: ignore[misc]
        size = torch.tensor([len(inputs)], device=inputs.device)
        sizes = replicas.all_gather(size).flatten().tolist() if shared else [len(inputs)]
        first = replicas.first_row() + sum(sizes[: replicas.rank()]) if shared else 0
        rows = torch.arange(len(inputs), device=inputs.device) + first
        return cls(inputs, labels, rows, rows, sum(sizes), replicas.training_count() if shared else 1, step)

    def part(self, start: int, stop: int) -> "Batch":
        """The rows from `start` to `stop` as a batch of their own."""
        inputs, labels, index, rows = (tensor[start:stop] for tensor in self[:4])
        mixed = self.mixed and type(self.mixed)(*(tensor[start:stop] for tensor in self.mixed))
        return Batch(inputs, labels, index, rows, max(stop - start, 1), 1, self.step, self.label_weight, mixed)

    @property
    def share(self) -> float:
        """The weight of the mean over these rows: averaged over the ranks, weighted means give the global mean."""
        return len(self.labels) * self.replicas / self.count

    def mean(self, per_sample: Tensor) -> Tensor:
        """This rank's part of the global mean of a (b,) tensor; the average over the ranks is that mean, exactly."""
        return per_sample.sum() * (self.replicas / self.count)
