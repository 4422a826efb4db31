"""Samples that are read while a net trains, by worker processes, in the order in which they are wanted."""

import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from apprentice.errors import BadInput
from datamodules.splits import Samples, Source, Split

Finish = Callable[[Tensor, int, Tensor], Tensor]  # of stored inputs (k, ...), the epoch, and their index (k,)


class Streamed:
    """Samples of a source that are read when they are taken, each time anew.

    Args:
        source: what is read; it has labels, which are in memory.
        workers: processes that read ahead for one rank; 0 for none, None for this machine's cores over its ranks.
    """

    def __init__(self, source: Source, workers: int | None) -> None:
        self.source, self.workers, self.labels = source, workers, source.labels
        self.pinned, self.sharing = False, 1

    def take(self, chosen: Tensor) -> Split:
        """The samples at these (k,) places; each is read once, however often it is among them."""
        return self.finished(chosen, None, 0)

    def to(self, device: torch.device, sharing: int = 1) -> "Streamed":
        """The same for a rank on that device, one of `sharing` on its machine."""
        rank = Streamed(self.source, self.workers)
        rank.pinned, rank.sharing = device.type == "cuda", sharing
        return rank

    def read(self, wanted: Iterable[Tensor], finish: Finish | None = None, epoch: int = 0) -> Iterator[Split]:
        """The samples at each of the `wanted` places (k,) in turn, with finished inputs.

        BadInput as of the source; RuntimeError where a worker died.
        """
        workers = max(1, cores() // self.sharing) if self.workers is None else self.workers
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: as one wishes
            read = iter(
                DataLoader(
                    _Wanted(self, finish, epoch),
                    batch_size=None,
                    sampler=wanted,
                    collate_fn=_as_it_is,
                    num_workers=workers,
                    pin_memory=self.pinned,
                    worker_init_fn=quiet_worker,
                    generator=torch.Generator(),  # it would draw from torch's own
                )
            )
        try:
            for found in read:
                if isinstance(found, BadInput):
                    raise found
                yield found
        except (ConnectionError, EOFError) as lost:  # in the middle of handing over, before the loader sees it dead
            raise RuntimeError("DataLoader worker exited unexpectedly") from lost

    def finished(self, chosen: Tensor, finish: Finish | None, epoch: int) -> Split:
        """As `take`, with finished inputs."""
        once, back = chosen.cpu().unique(return_inverse=True)
        twice = len(once) < len(chosen)
        inputs, labels = self.source.take(read := once if twice else chosen.cpu())
        found = Split(inputs if finish is None else finish(inputs, epoch, read), labels)
        return found.take(back) if twice else found


class _Wanted(Dataset):
    """Reads the samples at places; a fault is handed over, as an exception in a worker would lose what it says."""

    def __init__(self, samples: Streamed, *finish: Any) -> None:
        self.samples, self.finish = samples, finish

    def __getitem__(self, chosen: Tensor) -> Split | BadInput:
        try:
            return self.samples.finished(chosen, *self.finish)
        except BadInput as fault:
            return fault


def read_batches(
    samples: Samples | Streamed, wanted: Iterable[Tensor], finish: Finish | None = None, epoch: int = 0
) -> Iterator[Split]:
    """The samples at each of the `wanted` places (k,) in turn; `finish` is for those that are streamed."""
    return samples.read(wanted, finish, epoch) if isinstance(samples, Streamed) else map(samples.take, wanted)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_it_is(found: Any) -> Any:
    return found


def quiet_worker(_: int) -> None:
    """A worker ends when the process that reads does; that one handles the signals of a group."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for ends in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ends, signal.SIG_DFL)
