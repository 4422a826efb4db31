"""The order of samples in an epoch, and loaders of batches: one indexing of a uint8 tensor, without workers."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_flatten

from apprentice import keyed
from apprentice.batch import HIDDEN, Batch, Partners
from datamodules.splits import Samples, Split


class EpochOrder:
    """The seeded order of the current epoch, the same on every rank.

    Lightning calls `set_epoch` before each of its passes. Such a pass begins at `position()`, which is above zero when
    a fit resumes in mid-epoch; any other pass over the loader begins at the start.

    Args:
        size: number of samples.
        seed: the training seed.
        position: batches of the current epoch that the running fit has completed.
        repeats: whether all epochs have the order of the first, as for a Trainer's `overfit_batches`.
    """

    def __init__(self, size: int, seed: int, position: Callable[[], int] = lambda: 0, repeats: bool = False) -> None:
        self.size, self.seed, self.epoch = size, seed, 0
        self._position, self._announced, self._repeats = position, False, repeats

    def __len__(self) -> int:
        return self.size

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from the next pass on."""
        self.epoch, self._announced = epoch, True

    def start(self) -> int:
        """The batch at which the pass that begins now starts; each `set_epoch` counts for one pass."""
        announced, self._announced = self._announced, False
        return self._position() if announced else 0

    def indices(self) -> Tensor:
        """(size,) int64, the order of the current epoch."""
        return keyed.permutation(self.size, self.seed, self._key)

    @property
    def _key(self) -> int:
        return 0 if self._repeats else self.epoch

    def share(self, start: int, count: int, rank: int, replicas: int) -> Tensor:
        """(b,) int64, the rows that this rank sees of a global batch of `count` from `start` on; b may be 0."""
        return torch.arange(count).tensor_split(replicas)[rank]


class PartitionedOrder(EpochOrder):
    """Gives each rank a fixed, seeded partition of the samples, in an order of its own in each epoch.

    Partitions alternate in the global order in proportion to their sizes. Every global batch keeps its size, and has
    about a rank's fraction of samples from that rank's partition, perhaps none. `chosen` is the partition's seed.
    """

    def __init__(self, fractions: Sequence[float], chosen: int, size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(size, *args, **kwargs)
        cuts = [round(sum(fractions[:i]) * size) for i in range(len(fractions))]
        self.parts = keyed.permutation(size, chosen).split([b - a for a, b in itertools.pairwise([*cuts, size])])
        turns = [(torch.arange(len(part)) + 0.5) / max(len(part), 1) for part in self.parts]
        owners = [torch.full((len(part),), rank) for rank, part in enumerate(self.parts)]
        self._owners = torch.cat(owners)[torch.cat(turns).argsort(stable=True)]  # (size,) of each place in the order

    def indices(self) -> Tensor:
        """(size,) int64, the order of the current epoch."""
        order = torch.empty(self.size, dtype=torch.int64)
        for rank, part in enumerate(self.parts):
            order[self._owners == rank] = part[keyed.permutation(len(part), self.seed, self._key, rank)]
        return order

    def share(self, start: int, count: int, rank: int, replicas: int) -> Tensor:
        """(b,) int64, the rows of a global batch from this rank's partition; b may be 0."""
        return (self._owners[start : start + count] == rank).nonzero().flatten()


class TrainLoader:
    """This rank's rows of each global batch, in the sampler's order.

    The last batch may be smaller; none is dropped. Every rank gets the same number of batches, some perhaps empty.
    `batch_size` counts samples of the global batch; batches are on the split's device. `labelled` (n,) bool, on the
    CPU, says whose labels are known; the others are hidden. With `partners` a batch brings, for each row, the sample of
    the row before, to be mixed with.
    """

    def __init__(
        self,
        split: Samples,
        batch_size: int,
        sampler: EpochOrder,
        rank: int = 0,
        replicas: int = 1,
        labelled: Tensor | None = None,
        partners: bool = False,
    ) -> None:
        if labelled is not None:
            split = Split(split.inputs, split.labels.where(labelled.to(split.labels.device), HIDDEN))
        self.split, self.batch_size, self.sampler = split, batch_size, sampler
        self.rank, self.replicas, self.labelled, self.partners = rank, replicas, labelled, partners

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # A generator asks for the position with the first batch; Lightning calls iter() long before.
        first_step = self.sampler.epoch * len(self)
        start, order = self.sampler.start(), self.sampler.indices()
        device = self.split.labels.device
        for position in range(start, len(self)):
            first = position * self.batch_size
            whole = order[first : first + self.batch_size]
            rows = self.sampler.share(first, len(whole), self.rank, self.replicas)
            index = whole[rows].to(device, non_blocking=True)
            mixed = None
            if self.partners:
                before = whole[rows - 1].to(device, non_blocking=True)
                mixed = Partners(*self.split.take(before), before)
            rows = rows.to(device, non_blocking=True)
            weight = None if self.labelled is None else len(whole) / max(int(self.labelled[whole].sum()), 1)
            samples = self.split.take(index)
            yield Batch(*samples, index, rows, len(whole), self.replicas, first_step + position, weight, mixed)

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


def no_loaders() -> CombinedLoader:
    """No loader: Lightning skips the stage silently. It would warn of an empty list or loader."""
    loaders = CombinedLoader([], "sequential")
    loaders._flattened, loaders._spec = tree_flatten([])  # it takes an empty list for one loader
    iter(loaders)  # which gives it a length
    return loaders
