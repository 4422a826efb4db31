"""The order of samples in an epoch, and loaders of batches, from tensors in memory or from a stream."""

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from apprentice import keyed
from apprentice.batch import HIDDEN, Batch, Partners
from apprentice.private import tree_flatten
from datamodules.splits import Samples
from datamodules.streams import Augment, SampleStream, read_batches


class EpochOrder:
    """The seeded order of `size` samples in the current epoch, the same on every rank.

    Lightning calls `set_epoch` before its passes, which begin at `position()`, the batches of the epoch that the fit
    has completed: above zero when it resumes in mid-epoch. Other passes over the loader begin at the start. If it
    `repeats`, all epochs have the order of the first, as with a Trainer's `overfit_batches`.
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
        """Return the batch at which a new pass starts; each `set_epoch` counts for one pass."""
        announced, self._announced = self._announced, False
        return self._position() if announced else 0

    def indices(self) -> Tensor:
        """Return (size,) int64, the order of the current epoch."""
        return keyed.permutation(self.size, self.seed, self._turn)

    @property
    def key(self) -> int:
        """The key of draws in the current epoch."""
        return keyed.fold_in(self.seed, self._turn)

    @property
    def _turn(self) -> int:
        return 0 if self._repeats else self.epoch

    def share(self, start: int, count: int, rank: int, replicas: int) -> Tensor:
        """Return (b,) int64, a rank's rows of the global batch of `count` samples from `start` on; b may be 0."""
        return torch.arange(count).tensor_split(replicas)[rank]


class PartitionedOrder(EpochOrder):
    """Gives each rank a fixed, seeded partition of the samples, in an order of its own in each epoch.

    Partitions alternate in the global order in proportion to their sizes. A global batch keeps its size and has about a
    rank's fraction of its samples from that rank's partition, perhaps none. `partition_seed` seeds the partitions.
    """

    def __init__(self, fractions: Sequence[float], partition_seed: int, size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(size, *args, **kwargs)
        cuts = [round(sum(fractions[:i]) * size) for i in range(len(fractions))]
        self.parts = keyed.permutation(size, partition_seed).split(
            [b - a for a, b in itertools.pairwise([*cuts, size])]
        )
        turns = [(torch.arange(len(part)) + 0.5) / max(len(part), 1) for part in self.parts]
        owners = [torch.full((len(part),), rank) for rank, part in enumerate(self.parts)]
        self._owners = torch.cat(owners)[torch.cat(turns).argsort(stable=True)]  # (size,), of places in the order

    def indices(self) -> Tensor:
        order = torch.empty(self.size, dtype=torch.int64)
        for rank, part in enumerate(self.parts):
            order[self._owners == rank] = part[keyed.permutation(len(part), self.seed, self._turn, rank)]
        return order

    def share(self, start: int, count: int, rank: int, replicas: int) -> Tensor:
        """Return (b,) int64, the rows of a global batch from this rank's partition; b may be 0."""
        return (self._owners[start : start + count] == rank).nonzero().flatten()


class Resumable:
    """A loader with an empty state: Lightning would warn of one without when it resumes in mid-epoch.

    The order follows from seed and epoch, the position from Lightning's progress.
    """

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state_dict: dict) -> None:
        pass


@dataclass(eq=False)
class TrainLoader(Resumable):
    """This rank's rows of each global batch, in the sampler's order, on the split's device.

    The last batch may be smaller; none is dropped. Every rank gets the same number of batches, some perhaps empty.
    `labelled` (n,) bool, on the CPU, tells whose labels are not to be hidden. With `partners` a batch brings for each
    row the sample of the row before, to be mixed with. `augment` augments streamed inputs. `weights` (classes,) float64
    are those of the classes. `label_weight` is that of batches, of samples that have as many labels each.
    """

    split: Samples | SampleStream
    batch_size: int
    sampler: EpochOrder
    rank: int = 0
    replicas: int = 1
    labelled: Tensor | None = None
    partners: bool = False
    augment: Augment | None = None
    weights: Tensor | None = None
    label_weight: float | None = None

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # As a generator it reads the position with the first batch; Lightning calls iter() long before.
        epoch, start, order = self.sampler.epoch, self.sampler.start(), self.sampler.indices()
        device, ahead = self.split.labels.device, deque[tuple[Tensor, Tensor, Tensor]]()
        known = None if self.labelled is None else self.labelled.to(device)
        class_weights = self._class_weights()

        def places() -> Iterator[Tensor]:
            for first in range(start * self.batch_size, len(order), self.batch_size):
                whole = order[first : first + self.batch_size]
                rows = self.sampler.share(first, len(whole), self.rank, self.replicas)
                index = whole[torch.cat([rows, rows - 1]) if self.partners else rows].to(device, non_blocking=True)
                ahead.append((whole, rows.to(device, non_blocking=True), index))
                yield index

        batches = read_batches(self.split, places(), self.augment, epoch)
        for step, (inputs, true) in enumerate(batches, epoch * len(self) + start):
            whole, rows, index = ahead.popleft()
            b, labels, weight, mixed = len(rows), true, self.label_weight, None
            if known is not None:
                labels = true.where(known[index], HIDDEN)
                weight = len(whole) / max(int(cast("Tensor", self.labelled)[whole].sum()), 1)
            if self.partners:
                mixed = Partners(inputs[b:], labels[b:], index[b:])
            yield Batch(
                inputs[:b], labels[:b], index[:b], rows, len(whole), self.replicas, step, weight, mixed,
                class_weights and class_weights(whole),
            )  # fmt: skip

    def _class_weights(self) -> Callable[[Tensor], Tensor] | None:
        """Return what computes a batch's `class_weights` from the places of all of its rows, on the CPU."""
        if self.weights is None:
            return None
        labels = self.split.labels.cpu()
        of_samples, there = self.weights[labels], self.weights.to(self.split.labels.device)
        known = torch.ones(len(labels), dtype=torch.bool) if self.labelled is None else self.labelled

        def normalise(whole: Tensor) -> Tensor:
            total = float(of_samples[whole][known[whole]].sum())
            return there * (int(known[whole].sum()) / total if total else 0.0)

        return normalise


class ChunkLoader:
    """A split in index order, in chunks dealt to the ranks in turn: chunk c goes to rank c % replicas.

    Chunks are the same for any number of ranks, so kernels see the same shapes and give the same bits. Each sample of
    `index` (n,), by default all, is visited exactly once. Every rank gets the same number of batches, the last perhaps
    empty. A batch stands for itself: `replicas` is 1, `step` 0 and `count` its rows (1 if empty, so that its mean is
    0).
    """

    def __init__(
        self,
        split: Samples | SampleStream,
        batch_size: int,
        rank: int = 0,
        replicas: int = 1,
        index: Tensor | None = None,
    ) -> None:
        self.split, self.batch_size, self.rank, self.replicas = split, batch_size, rank, replicas
        self.index = torch.arange(len(split.labels)) if index is None else index

    def __len__(self) -> int:
        return math.ceil(len(self.index) / (self.batch_size * self.replicas))

    def __iter__(self) -> Iterator[Batch]:
        device = self.split.labels.device
        index = self.index.to(device)
        rows = torch.arange(min(self.batch_size, len(index)), device=device)
        starts = [(deal * self.replicas + self.rank) * self.batch_size for deal in range(len(self))]
        chunks = [index[start : start + self.batch_size] for start in starts]
        for chunk, samples in zip(chunks, read_batches(self.split, chunks), strict=True):
            b = len(chunk)
            yield Batch(*samples, chunk, rows[:b], max(b, 1), 1, 0)


def no_loaders() -> CombinedLoader:
    """Return a loader without batches, for which Lightning skips the stage; it would warn of an empty list."""
    loaders = CombinedLoader([], "sequential")
    loaders._flattened, loaders._spec = tree_flatten([])  # it takes an empty list for one loader
    iter(loaders)  # which gives it a length
    return loaders
