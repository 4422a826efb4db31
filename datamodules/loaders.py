"""Loaders over samples in memory: a batch is one indexing of a uint8 tensor, without workers, collation or state."""

import math
from collections.abc import Iterator

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from apprentice.batch import Batch
from datamodules.sampling import EpochOrder
from datamodules.splits import Samples


class TrainLoader:
    """This rank's rows of each global batch, in the sampler's order.

    The last batch may be smaller; none is dropped. Every rank gets the same number of batches, some perhaps empty.
    `batch_size` counts samples of the global batch; batches are on the split's device.
    """

    def __init__(self, split: Samples, batch_size: int, sampler: EpochOrder, rank: int = 0, replicas: int = 1) -> None:
        self.split, self.batch_size, self.sampler = split, batch_size, sampler
        self.rank, self.replicas = rank, replicas

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # A generator asks for the position with the first batch; Lightning calls iter() long before.
        first_step = self.sampler.epoch * len(self)
        start = self.sampler.start()
        device = self.split.labels.device
        order = self.sampler.indices()
        for position in range(start, len(self)):
            first = position * self.batch_size
            whole = order[first : first + self.batch_size]
            rows = self.sampler.share(first, len(whole), self.rank, self.replicas)
            index = whole[rows].to(device, non_blocking=True)
            inputs, labels = self.split.take(index)
            rows = rows.to(device, non_blocking=True)
            yield Batch(inputs, labels, index, rows, len(whole), self.replicas, first_step + position)

    # Without these two Lightning warns when it resumes in mid-epoch.
    def state_dict(self) -> dict:
        """Empty: seed and epoch give the order, and Lightning's progress has the position."""
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        """Nothing to do."""


class ChunkLoader:
    """A split in index order, in chunks that are dealt to the ranks in turn: chunk c goes to rank c % replicas.

    Chunks are the same for any number of ranks, so a kernel sees the same shapes, and gives the same bits, on all of
    them. Each sample is visited exactly once. Every rank gets the same number of batches, the last perhaps empty. A
    batch stands for itself: `replicas` is 1, `step` 0 and `count` its rows (1 if empty, so that its mean is 0).
    `index` (n,) int64 has the samples' places in their data set, if the split is only a part of it.
    """

    def __init__(
        self, split: Samples, batch_size: int, rank: int = 0, replicas: int = 1, index: Tensor | None = None
    ) -> None:
        self.split, self.batch_size, self.rank, self.replicas, self.index = split, batch_size, rank, replicas, index

    def __len__(self) -> int:
        return math.ceil(len(self.split.labels) / (self.batch_size * self.replicas))

    def __iter__(self) -> Iterator[Batch]:
        places = torch.arange(len(self.split.labels), device=self.split.labels.device)
        rows, index = places[: self.batch_size], places if self.index is None else self.index
        for deal in range(len(self)):
            start = (deal * self.replicas + self.rank) * self.batch_size
            chunk = slice(start, start + self.batch_size)
            b = len(index[chunk])
            yield Batch(self.split.inputs[chunk], self.split.labels[chunk], index[chunk], rows[:b], max(b, 1), 1, 0)


class NoLoaders(CombinedLoader):
    """No loader: Lightning skips the stage silently. It would warn of an empty list or loader."""

    def __init__(self) -> None:
        super().__init__([], "sequential")

    @property
    def flattened(self) -> list:
        """Empty; CombinedLoader itself takes an empty list for one loader."""
        return []

    @flattened.setter
    def flattened(self, flattened: list) -> None:
        """There is nothing to replace."""

    def __len__(self) -> int:
        return 0
