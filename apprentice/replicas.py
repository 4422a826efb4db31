"""Collectives over the ranks that share a batch. Without a process group there is one replica and nothing is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

FEWEST_ROWS = 8  # in a shard of which BatchNorm computes statistics

_first_row: ContextVar[int | None] = ContextVar("first_row", default=None)
_group: dist.ProcessGroup | None = None
_idle = 0


def set_group(ranks: dist.ProcessGroup | None, idle: int = 0) -> None:
    """Set the processes that hold a replica each (None: all); `idle` of them get no rows, such as parameter servers."""
    global _group, _idle
    _group, _idle = ranks, idle


def group() -> dist.ProcessGroup | None:
    """Return the process group of the replicas; None for all processes."""
    return _group


@contextmanager
def shard(first_row: int) -> Iterator[None]:
    """Inside, this process computes the rows of a global batch from `first_row` on, as if there were one replica."""
    token = _first_row.set(first_row)
    try:
        yield
    finally:
        _first_row.reset(token)


def is_shard() -> bool:
    """Return whether a strategy computes a shard of a global batch now."""
    return _first_row.get() is not None


def first_row() -> int:
    """Return the row of the global batch at which the current shard begins; 0 outside of a shard."""
    return _first_row.get() or 0


def count() -> int:
    """Return the number of data-parallel ranks; 1 inside a shard."""
    if is_shard():
        return 1
    return dist.get_world_size(_group) if dist.is_available() and dist.is_initialized() else 1


def training_count() -> int:
    """Return the number of ranks that gradients are averaged over: those that get rows."""
    return max(count() - _idle, 1)


def rank() -> int:
    """Return this process's rank among the replicas."""
    return dist.get_rank(_group) if count() > 1 else 0


def all_reduce_sum(x: Tensor) -> Tensor:
    """Return the sum over the ranks of `x` (any shape, no gradient), the same on all of them."""
    return all_reduce_sum_(x.clone())


def all_reduce_sum_(x: Tensor) -> Tensor:
    """Sum `x` over the ranks, in place."""
    if count() > 1:
        dist.all_reduce(x, group=_group)
    return x


def all_reduce_max_(x: Tensor) -> Tensor:
    """Take the elementwise maximum of `x` over the ranks, in place."""
    if count() > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=_group)
    return x


def bound_all_reduce_sum() -> Callable[[Tensor], Tensor]:
    """Return `all_reduce_sum` over the current replicas, for a backward that runs later or in another thread."""
    ranks = _group

    def total(x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=ranks)
        return x

    return total if count() > 1 else torch.clone


def all_gather(x: Tensor) -> Tensor:
    """Return (replicas, *x.shape): every rank's `x`, in the order of the ranks; no gradient."""
    if count() == 1:
        return x[None]
    parts = [torch.empty_like(x) for _ in range(count())]
    dist.all_gather(parts, x.contiguous(), group=_group)
    return torch.stack(parts)
