"""A rank's share of a global batch: all that a loss needs to be the same number on any number of devices."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apprentice import replicas


class Batch(NamedTuple):
    """The b rows that this rank sees of a global batch of `count` rows; b may be 0.

    Attributes:
        images: (b, C, H, W), uint8 as stored or float once normalised.
        labels: (b,) int64.
        index: (b,) int64, each sample's place in its data set.
        rows: (b,) int64, each sample's row in the global batch.
        count: rows in the global batch.
        replicas: ranks that share the batch; gradients are averaged over them.
        step: number of this global batch since training began.
    """

    images: Tensor
    labels: Tensor
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index, which a batch has no use for
    rows: Tensor
    count: int  # type: ignore[assignment]
    replicas: int
    step: int

    @classmethod
    def of(cls, batch: "Batch | Sequence[Tensor]", step: int, shared: bool = True) -> "Batch":
        """The batch itself, or a plain (images, labels) pair from anyone's DataLoader.

        If `shared`, the pairs that all ranks have now are one global batch; else a rank's pair stands for itself.
        """
        if isinstance(batch, cls):
            return batch
        images, labels = batch  # type: ignore[misc]
        size = torch.tensor([len(images)], device=images.device)
        sizes = replicas.gathered(size).flatten().tolist() if shared else [len(images)]
        first = replicas.first_row() + sum(sizes[: replicas.rank()]) if shared else 0
        rows = torch.arange(len(images), device=images.device) + first
        return cls(images, labels, rows, rows, sum(sizes), len(sizes), step)

    def part(self, start: int, stop: int) -> "Batch":
        """The rows from `start` to `stop` as a batch that stands for itself."""
        images, labels, index, rows = (tensor[start:stop] for tensor in self[:4])
        return Batch(images, labels, index, rows, max(stop - start, 1), 1, self.step)

    def mean(self, per_sample: Tensor) -> Tensor:
        """This rank's part of the global mean of a (b,) tensor: averaged over the ranks it is that mean, exactly."""
        return per_sample.sum() * (self.replicas / self.count)
