"""Batches of texts of unequal lengths, filled up to the longest."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from apprentice.batch import Batch
from datamodules.loaders import EpochOrder, Resumable
from datamodules.token_files import Texts


@dataclass(eq=False)
class TextLoader(Resumable):
    """This rank's rows of each global batch of texts, in the sampler's order.

    Rows of all ranks are as long as the longest text of the global batch, so that a row has the same bits wherever it
    is computed. A batch's `label_weight` follows from the texts' numbers of tokens, without a message between ranks.
    """

    texts: Texts
    batch_size: int
    sampler: EpochOrder
    rank: int = 0
    replicas: int = 1

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # As a generator it reads the position with the first batch; Lightning calls iter() long before.
        epoch, start, order = self.sampler.epoch, self.sampler.start(), self.sampler.indices()
        for number in range(start, len(self)):
            first = number * self.batch_size
            whole = order[first : first + self.batch_size]
            rows = self.sampler.share(first, len(whole), self.rank, self.replicas)
            yield self.batch(whole, rows, epoch * len(self) + number)

    def batch(self, whole: Tensor, rows: Tensor, step: int) -> Batch:
        """Return the `rows` (b,) of a global batch of the texts at places `whole` (n,)."""
        length = int(self.texts.lengths[whole].max())
        inputs, labels = self.texts.take(whole[rows], length)
        weight = len(whole) * length / int(self.texts.labels[whole].sum())
        return Batch(inputs, labels, whole[rows], rows, len(whole), self.replicas, step, weight)
