"""The order in which an epoch visits samples, and which of them a rank sees."""

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from apprentice import keyed


class EpochOrder:
    """The seeded order of the current epoch, the same on every rank.

    Lightning calls `set_epoch` before each of its passes. Such a pass begins at `position()`, which is above zero when
    a fit resumes in mid-epoch; any other pass over the loader begins at the start.

    Args:
        size: number of samples.
        seed: the training seed.
        position: batches of the current epoch that the running fit has completed.
    """

    def __init__(self, size: int, seed: int, position: Callable[[], int] = lambda: 0) -> None:
        self.size, self.seed, self.epoch = size, seed, 0
        self._position, self._announced = position, False

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch from the next pass on."""
        self.epoch, self._announced = epoch, True

    def start(self) -> int:
        """The batch at which the pass that begins now starts; each `set_epoch` counts for one pass."""
        announced, self._announced = self._announced, False
        return self._position() if announced else 0

    def indices(self) -> Tensor:
        """(size,) int64, the order of the current epoch."""
        return keyed.permutation(self.size, self.seed, self.epoch)

    def share(self, start: int, count: int, rank: int, replicas: int) -> Tensor:
        """(b,) int64, the rows of a global batch that this rank sees; b may be 0.

        The batch has `count` rows, from the place `start` in the epoch's order on.
        """
        return share(count, rank, replicas)

    def __len__(self) -> int:
        return self.size


class PartitionedOrder(EpochOrder):
    """Gives each rank a fixed, seeded partition of the samples, in an order of its own in each epoch.

    Partitions alternate in the global order in proportion to their sizes. Every global batch keeps its size, and has
    about a rank's fraction of samples from that rank's partition, perhaps none.

    Args:
        fractions: each rank's fraction of the whole.
        chosen: seed of the partition.
    """

    def __init__(
        self, fractions: Sequence[float], chosen: int, size: int, seed: int, position: Callable[[], int] = lambda: 0
    ) -> None:
        super().__init__(size, seed, position)
        cuts = [round(sum(fractions[:i]) * size) for i in range(len(fractions))]
        self.parts = keyed.permutation(size, chosen).split([b - a for a, b in itertools.pairwise([*cuts, size])])
        turns = [(torch.arange(len(part)) + 0.5) / max(len(part), 1) for part in self.parts]
        owners = [torch.full((len(part),), rank) for rank, part in enumerate(self.parts)]
        self._owners = torch.cat(owners)[torch.cat(turns).argsort(stable=True)]  # (size,) of each place in the order

    def indices(self) -> Tensor:
        """(size,) int64, the order of the current epoch."""
        order = torch.empty(self.size, dtype=torch.int64)
        for rank, part in enumerate(self.parts):
            order[self._owners == rank] = part[keyed.permutation(len(part), self.seed, self.epoch, rank)]
        return order

    def share(self, start: int, count: int, rank: int, replicas: int) -> Tensor:
        """(b,) int64, the rows of a global batch from this rank's partition; b may be 0."""
        return (self._owners[start : start + count] == rank).nonzero().flatten()


@functools.lru_cache(64)
def share(count: int, rank: int, replicas: int) -> Tensor:
    """(b,) int64, this rank's contiguous rows of a global batch of `count`; b may be 0. Cached: do not modify it."""
    with torch.inference_mode(False):  # the first call may be in an evaluation, and a later one in training
        return torch.arange(count).tensor_split(replicas)[rank]
