"""Which samples an epoch visits in which order, and which of them a rank sees."""

from collections.abc import Callable

import torch
from torch import Tensor

from apprentice import keyed


class EpochOrder:
    """The seeded order of the current epoch, the same on every rank.

    Lightning calls `set_epoch` before each pass of its own. Such a pass begins at `position()`, which is not zero when
    a fit goes on from a checkpoint that was written in mid-epoch; any other pass over the loader is a whole one.

    Args:
        size: samples in the training set.
        seed: the training seed.
        position: batches of the current epoch that the running fit has behind it.
    """

    def __init__(self, size: int, seed: int, position: Callable[[], int] = lambda: 0) -> None:
        self.size, self.seed, self.epoch = size, seed, 0
        self._position, self._announced = position, False

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch from the next pass on."""
        self.epoch, self._announced = epoch, True

    def start(self) -> int:
        """The batch at which the pass that begins now starts; each announcement counts for one pass."""
        announced, self._announced = self._announced, False
        return self._position() if announced else 0

    def indices(self) -> Tensor:
        """(size,) int64, the order of the current epoch."""
        return keyed.permutation(self.size, self.seed, self.epoch)

    def __len__(self) -> int:
        return self.size


def share(count: int, rank: int, replicas: int) -> Tensor:
    """(b,) int64, the rows of a global batch of `count` that this rank sees: contiguous, b may be 0."""
    return torch.arange(count).tensor_split(replicas)[rank]
