"""Sums over the ranks that share a batch. Without a process group there is one replica and nothing is sent."""

import torch
import torch.distributed as dist
from torch import Tensor


def count() -> int:
    """Number of data-parallel ranks."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's place among them."""
    return dist.get_rank() if count() > 1 else 0


def total(x: Tensor) -> Tensor:
    """The sum of every rank's `x` (any shape, no gradient), the same on all ranks."""
    return add_up(x.clone())


def add_up(x: Tensor) -> Tensor:
    """`total`, in place of `x`."""
    if count() > 1:
        dist.all_reduce(x)
    return x


def gathered(x: Tensor) -> Tensor:
    """(replicas, *x.shape): every rank's `x`, in the order of the ranks; no gradient."""
    if count() == 1:
        return x[None]
    parts = [torch.empty_like(x) for _ in range(count())]
    dist.all_gather(parts, x.contiguous())
    return torch.stack(parts)
