"""Ranks' shares of batches from other people's loaders, in an order that the seed determines."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from apprentice.batch import Batch
from apprentice.errors import BadInput, reason
from apprentice.keyed import fold_in, with_seed
from datamodules.loaders import EpochOrder, Resumable
from datamodules.splits import FLOAT_TASKS, as_floats
from datamodules.streams import quiet_worker

Loader: TypeAlias = Any  # a DataLoader, or another iterable of batches (inputs, labels) with a length


class SharedLoader(Resumable):
    """A rank's rows of each of a loader's batches, in the order of an epoch."""

    def __init__(self, loader: Loader, order: EpochOrder, rank: int, replicas: int) -> None:
        self.loader, self.sampler, self.rank, self.replicas = loader, order, rank, replicas

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self.sampler.epoch, self.sampler.start()

        def share(count: int) -> Tensor:
            return self.sampler.share(0, count, self.rank, self.replicas)

        parts = read_rows(self.loader, self.sampler.key, [(number, share) for number in range(start, len(self))])
        for step, part in enumerate(parts, epoch * len(self) + start):
            yield part._replace(replicas=self.replicas, step=step)


class RoundRobinLoader:
    """The first `kept` of a loader's batches, dealt to the ranks in turn: batch c goes to rank c % replicas.

    Every rank gets the same number of batches, the last perhaps empty. A batch stands for itself, as in `ChunkLoader`.
    """

    def __init__(self, loader: Loader, kept: int, rank: int, replicas: int, key: int) -> None:
        self.loader, self.kept, self.rank, self.replicas, self.key = loader, kept, rank, replicas, key

    def __len__(self) -> int:
        return math.ceil(self.kept / self.replicas)

    def __iter__(self) -> Iterator[Batch]:
        numbers = range(self.rank, len(self) * self.replicas, self.replicas)
        none = self.kept - 1, lambda _: torch.arange(0)
        choices = [(number, torch.arange) if number < self.kept else none for number in numbers]
        for part in read_rows(self.loader, self.key, choices):
            yield part._replace(count=max(len(part.rows), 1))


ChooseRows: TypeAlias = Callable[[int], Tensor]  # from the size of a batch to the rows to read


def read_rows(loader: Loader, key: int, choices: Sequence[tuple[int, ChooseRows]]) -> Iterator[Batch]:
    """Read rows of batches; `choices` are the numbers of batches, which don't decrease, and their rows."""
    if not is_indexed(loader):
        batches, first, inputs, labels, at = iter(loader), 0, torch.empty(0), torch.empty(0), -1
        for number, choose in choices:
            while at < number:
                first += len(labels)
                (inputs, labels), at = read_pair(next(batches)), at + 1
            rows = choose(len(labels))
            yield Batch(inputs[rows], labels[rows], rows + first, rows, len(labels), 1, 0)
        return
    drawn = draw_batches(loader, key)
    chosen = [choose(len(drawn[number])) for number, choose in choices]
    places = [torch.tensor(drawn[number]) for number, _ in choices]
    # A data set may not be able to give no samples: for their shape, one is read.
    lists = [(whole[rows] if len(rows) else whole[:1]).tolist() for whole, rows in zip(places, chosen, strict=True)]
    for whole, rows, batch in zip(places, chosen, fetch_batches(loader, key, lists), strict=True):
        inputs, labels = read_pair(batch)
        yield Batch(inputs[: len(rows)], labels[: len(rows)], whole[rows], rows, len(whole), 1, 0)


def read_samples(loader: Loader, key: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Read inputs and labels of the samples at these (k,) places in a loader's order."""
    if is_indexed(loader):
        order = torch.tensor([place for batch in draw_batches(loader, key) for place in batch])
        return read_pair(next(fetch_batches(loader, key, [order[chosen].tolist()])))
    batches, read = iter(loader), list[tuple[Tensor, Tensor]]()
    while sum(len(labels) for _, labels in read) <= int(chosen.max()):
        read.append(read_pair(next(batches)))
    inputs, labels = (torch.cat(parts)[chosen] for parts in zip(*read, strict=True))
    return inputs, labels


def is_indexed(loader: Loader) -> bool:
    """Return whether a loader's batches are lists of places in a data set."""
    return (
        isinstance(loader, DataLoader)
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def class_names_of(loader: Loader) -> tuple[str, ...]:
    """Return the class names of a loader's data set, its `classes` as in torchvision; () if it has none."""
    dataset = getattr(loader, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()


def draw_batches(loader: DataLoader, key: int) -> list[list[int]]:
    """Return the places of all batches of an epoch, as the sampler draws them with its generators seeded by the key."""
    generator = getattr(loader.sampler, "generator", None)
    if generator is not None:
        generator.manual_seed(key)
    sampler: Any = loader.batch_sampler
    return with_seed(key, lambda: list(sampler))


def fetch_batches(loader: DataLoader, key: int, batches: list[list[int]]) -> Iterator[Any]:
    """Read batches of these places by the loader's workers."""
    changed = copy.copy(loader)
    # A DataLoader lets none of these be assigned.
    vars(changed).update(
        dataset=_Keyed(loader.dataset, key), batch_sampler=batches, generator=torch.Generator(), _iterator=None,
        worker_init_fn=loader.worker_init_fn or quiet_worker, collate_fn=partial(_collate, loader.collate_fn),
    )  # fmt: skip
    fault: BadInput | None = None
    for batch in changed:
        if isinstance(batch, BadInput):
            fault = batch
            break
        yield batch
    if fault is not None:  # outside of the loop, which would hold the other workers
        raise fault


def _collate(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """Join samples; return a fault as BadInput, as an exception in a worker would lose its message."""
    try:
        return collate(samples)
    except Exception as error:  # noqa: BLE001 - whatever a collate_fn makes of samples that differ
        return BadInput("data", "a batch", f"samples that can be joined, of one size; they can't: {reason(error)}")


class _Keyed(Dataset):
    """A data set whose samples draw random numbers that depend on the key and their places alone."""

    def __init__(self, dataset: Dataset, key: int) -> None:
        self.dataset, self.key = dataset, key

    def __getitem__(self, place: int) -> Any:
        return with_seed(fold_in(self.key, place), lambda: self.dataset[place])


def read_pair(batch: Any) -> tuple[Tensor, Tensor]:
    """Return inputs (n, ...) and labels (n, ...) of a batch, classes as int64; raise BadInput if it is no such pair."""
    inputs, labels = batch if isinstance(batch, list | tuple) and len(batch) == 2 else (batch, None)
    if not isinstance(inputs, Tensor) or not isinstance(labels, Tensor):
        raise _no_pair(batch)
    return inputs, labels if labels.dim() != 1 or _has_fractions(labels) else labels.long()


def unpack_pair(batch: Any, task: str = "classification", columns: int | None = None) -> tuple[Tensor, Tensor]:
    """Return inputs (n, ...) and labels (n,) int64, or as a task of `FLOAT_TASKS` has them, (n, columns) floats.

    BadInput for another batch.
    """
    inputs, labels = read_pair(batch)
    if task in FLOAT_TASKS:
        return inputs, as_floats(labels, task, columns or labels[0].numel(), "a batch")
    if labels.dim() != 1 or _has_fractions(labels):
        raise _no_pair(batch)
    return inputs, labels


def _no_pair(batch: Any) -> BadInput:
    kinds = ", ".join(map(_kind, batch)) if isinstance(batch, list | tuple) else _kind(batch)
    expected = "batches of two tensors, inputs (n, ...) and labels (n,) of whole numbers, a class for each sample"
    return BadInput("data", kinds, expected)


def _has_fractions(labels: Tensor) -> bool:
    return labels.is_floating_point() or labels.is_complex()


def _kind(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
