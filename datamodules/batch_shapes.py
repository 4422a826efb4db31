"""The sizes of the batches that training computes, and one batch that stands for all of them."""

from typing import NamedTuple

import torch
from torch import Tensor

from apprentice.batch import Batch


class BatchShapes(NamedTuple):
    """Sizes of n global batches in their order, (n,) int64 each."""

    samples: Tensor
    rows: Tensor  # as many, unless rows hold several samples
    lengths: Tensor  # of each row, with what fills it up; 1 for what has no length
    labels: Tensor  # that count, in all rows

    @classmethod
    def equal(cls, samples: int, batch_size: int, label_shape: tuple[int, ...]) -> "BatchShapes":
        """Cut samples, all of one shape, into batches, of which the last may be smaller."""
        sizes = torch.tensor([min(batch_size, samples - first) for first in range(0, samples, batch_size)])
        length = label_shape[0] if label_shape else 1
        return cls(sizes, sizes, torch.full_like(sizes, length), sizes * length)

    @classmethod
    def cat(cls, parts: "list[BatchShapes]") -> "BatchShapes":
        """Put batches one after the other."""
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))

    def select(self, chosen: Tensor) -> "BatchShapes":
        """Return the batches at places (k,), or those of a mask (n,)."""
        return BatchShapes(*(column[chosen] for column in self))

    def typical(self) -> int:
        """Return the place of the first batch whose size, filled up, is nearest to the mean."""
        sizes = (self.rows * self.lengths).double()
        return int((sizes - sizes.mean()).abs().argmin())


class TypicalBatch(NamedTuple):
    """A whole global batch of training of about the mean size, by which steps are measured."""

    batch: Batch
    labels: float  # in a batch on average, without what fills rows up
