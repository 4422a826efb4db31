"""Sums over the ranks that share a batch. Without a process group there is one replica and nothing is sent."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

_first_row: ContextVar[int | None] = ContextVar("first_row", default=None)
_group: dist.ProcessGroup | None = None
_idle = 0


def set_group(ranks: dist.ProcessGroup | None, idle: int = 0) -> None:
    """Say which processes hold a replica each, this one among them, where that is not all (None).

    Args:
        ranks: these processes.
        idle: how many of them get no rows in training, such as a parameter server.
    """
    global _group, _idle
    _group, _idle = ranks, idle


def group() -> dist.ProcessGroup | None:
    """The processes that hold a replica each, for collectives; None: all."""
    return _group


@contextmanager
def shard(first_row: int) -> Iterator[None]:
    """Inside, this process computes some rows of a global batch by themselves: nothing is shared.

    Args:
        first_row: the first of these rows in the global batch.
    """
    token = _first_row.set(first_row)
    try:
        yield
    finally:
        _first_row.reset(token)


def first_row() -> int:
    """The row of the global batch at which a shard begins; 0 outside of one."""
    return _first_row.get() or 0


def count() -> int:
    """Number of data-parallel ranks; 1 inside a shard."""
    if _first_row.get() is not None:
        return 1
    return dist.get_world_size(_group) if dist.is_available() and dist.is_initialized() else 1


def averaged() -> int:
    """Number of ranks that gradients are averaged over: those that get rows."""
    return max(count() - _idle, 1)


def rank() -> int:
    """This process's place among them."""
    return dist.get_rank(_group) if count() > 1 else 0


def all_reduce_sum(x: Tensor) -> Tensor:
    """The sum of every rank's `x` (any shape, no gradient), the same on all ranks."""
    return all_reduce_sum_(x.clone())


def all_reduce_sum_(x: Tensor) -> Tensor:
    """`all_reduce_sum`, in place of `x`."""
    if count() > 1:
        dist.all_reduce(x, group=_group)
    return x


def all_reduce_max_(x: Tensor) -> Tensor:
    """The largest of every rank's `x`, element by element, in place of `x`."""
    if count() > 1:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=_group)
    return x


def summing() -> Callable[[Tensor], Tensor]:
    """`all_reduce_sum` among those who are replicas now, for a backward that may run when or where others are."""
    return partial(_summed, _group) if count() > 1 else torch.clone


def _summed(ranks: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=ranks)
    return x


def all_gather(x: Tensor) -> Tensor:
    """(replicas, *x.shape): every rank's `x`, in the order of the ranks; no gradient."""
    if count() == 1:
        return x[None]
    parts = [torch.empty_like(x) for _ in range(count())]
    dist.all_gather(parts, x.contiguous(), group=_group)
    return torch.stack(parts)
