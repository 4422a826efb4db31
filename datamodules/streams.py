"""Samples that worker processes read while a net trains, in the order of use."""

import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from apprentice.errors import BadInput
from datamodules.splits import Samples, Source, Split

MOST_WORKERS = 512  # of a rank
Augment = Callable[[Tensor, int, Tensor], Tensor]  # augments stored inputs (k, ...) of an epoch, with index (k,)


class SampleStream:
    """Samples of a source, read at each use by `workers` of each rank: None for this machine's cores over its ranks."""

    def __init__(self, source: Source, workers: int | None) -> None:
        self.source, self.workers, self.labels = source, workers, source.labels
        self.pinned, self.sharing = False, 1

    def take(self, chosen: Tensor, augment: Augment | None = None, epoch: int = 0) -> Split:
        """Read and augment the samples at these (k,) places, each once even if it is there twice."""
        unique, inverse = chosen.cpu().unique(return_inverse=True)
        repeats = len(unique) < len(chosen)
        places = unique if repeats else chosen.cpu()
        inputs, labels = self.source.take(places)
        split = Split(inputs if augment is None else augment(inputs, epoch, places), labels)
        return split.take(inverse) if repeats else split

    def to(self, device: torch.device, sharing: int = 1) -> "SampleStream":
        """Return the stream for a rank on that device, one of `sharing` on its machine."""
        rank = SampleStream(self.source, self.workers)
        rank.pinned, rank.sharing = device.type == "cuda", sharing
        return rank

    def read(self, batches: Iterable[Tensor], augment: Augment | None = None, epoch: int = 0) -> Iterator[Split]:
        """Read samples with augmented inputs; `batches` are their places (k,).

        Raises:
            BadInput: as the source.
            RuntimeError: a worker died.
        """
        workers = max(1, cores() // self.sharing) if self.workers is None else self.workers
        if isinstance(batches, Sized):
            workers = min(workers, len(batches))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
            loader = DataLoader(
                _Reader(self, augment, epoch), batch_size=None, sampler=batches, collate_fn=_identity,
                num_workers=workers, pin_memory=self.pinned, worker_init_fn=quiet_worker,
                generator=torch.Generator(),  # otherwise it draws from torch's
            )  # fmt: skip
            splits = iter(loader)
        fault: BadInput | None = None
        try:
            for split in splits:
                if isinstance(split, BadInput):
                    fault = split
                    break
                yield split
        except (ConnectionError, EOFError) as lost:  # while it sent samples, before the loader sees it dead
            raise RuntimeError("DataLoader worker exited unexpectedly") from lost
        if fault is not None:
            del splits  # ends the other workers; what is raised would hold them, and they would be killed as they read
            raise fault


class _Reader(Dataset):
    """Reads the samples at places; returns a fault, as an exception in a worker would lose its message."""

    def __init__(self, samples: SampleStream, augment: Augment | None, epoch: int) -> None:
        self.samples, self.augment, self.epoch = samples, augment, epoch

    def __getitem__(self, chosen: Tensor) -> Split | BadInput:
        try:
            return self.samples.take(chosen, self.augment, self.epoch)
        except BadInput as fault:
            return fault


def read_batches(
    samples: Samples | SampleStream, batches: Iterable[Tensor], augment: Augment | None = None, epoch: int = 0
) -> Iterator[Split]:
    """Read samples; `batches` are their places (k,). `augment` augments streamed ones."""
    return samples.read(batches, augment, epoch) if isinstance(samples, SampleStream) else map(samples.take, batches)


def check_workers(count: int | None, flag: str) -> None:
    """Raise BadInput for a number of processes that no machine should start."""
    if count is not None and not 0 <= count <= MOST_WORKERS:
        raise BadInput(flag, count, f"a number of processes: 0, 1, 2, …, at most {MOST_WORKERS}")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _identity(batch: Any) -> Any:
    return batch


def quiet_worker(_: int) -> None:
    """Let the reading process handle a group's signals; a worker ends when that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, signal.SIG_DFL)
