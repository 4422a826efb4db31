"""A rank's share of a global batch: all that a loss needs to be the same number on any number of devices."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apprentice import replicas


class Batch(NamedTuple):
    """The b rows that this rank sees of a global batch of `count` rows; b may be 0.

    Attributes:
        inputs: (b, ...), images as stored uint8 (b, C, H, W) or floats once normalised, or token numbers (b, T).
        labels: (b,) int64, or (b, T) where each token has one.
        index: (b,) int64, each sample's place in its data set.
        rows: (b,) int64, each sample's row in the global batch.
        count: rows in the global batch.
        replicas: ranks that share the batch; gradients are averaged over them, and a server is none of them.
        step: number of this global batch since training began.
    """

    inputs: Tensor
    labels: Tensor
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index, which a batch has no use for
    rows: Tensor
    count: int  # type: ignore[assignment]
    replicas: int
    step: int

    @classmethod
    def of(cls, batch: "Batch | Sequence[Tensor]", step: int, shared: bool = True) -> "Batch":
        """The batch itself, or a plain (inputs, labels) pair from anyone's DataLoader.

        If `shared`, the pairs that all ranks have now are one global batch; else a rank's pair stands for itself.
        """
        if isinstance(batch, cls):
            return batch
        inputs, labels = batch  # type: ignore[misc]
        size = torch.tensor([len(inputs)], device=inputs.device)
        sizes = replicas.all_gather(size).flatten().tolist() if shared else [len(inputs)]
        first = replicas.first_row() + sum(sizes[: replicas.rank()]) if shared else 0
        rows = torch.arange(len(inputs), device=inputs.device) + first
        return cls(inputs, labels, rows, rows, sum(sizes), replicas.averaged() if shared else 1, step)

    def part(self, start: int, stop: int) -> "Batch":
        """The rows from `start` to `stop` as a batch that stands for itself."""
        inputs, labels, index, rows = (tensor[start:stop] for tensor in self[:4])
        return Batch(inputs, labels, index, rows, max(stop - start, 1), 1, self.step)

    @property
    def share(self) -> float:
        """What the mean over these rows counts, so that averaged over the ranks it is the global mean."""
        return len(self.labels) * self.replicas / self.count

    def mean(self, per_sample: Tensor) -> Tensor:
        """This rank's part of the global mean of a (b,) tensor: averaged over the ranks it is that mean, exactly."""
        return per_sample.sum() * (self.replicas / self.count)
