"""Gradients side by side in a few flat tensors, so that a few large messages carry them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Bucket:
    """The gradients of some parameters of one type on one device, and for each how many ranks have one.

    Args:
        parameters: at least one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        first, sizes = parameters[0], [p.numel() for p in parameters]
        self.flat = torch.zeros(sum(sizes) + len(sizes), dtype=first.dtype, device=first.device)
        *pieces, self._counts = self.flat.split([*sizes, len(sizes)])
        self._views = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]

    def begin(self, world_size: int) -> dist.Work | None:
        """Put the gradients in, and begin to add up all ranks'."""
        for view, p in zip(self._views, self.parameters, strict=True):
            view.zero_() if p.grad is None else view.copy_(p.grad)
        self._counts.copy_(torch.tensor([p.grad is not None for p in self.parameters]))
        self.flat /= world_size  # before they are added, as DDP does it: a sum of 16-bit floats may be too large
        return dist.all_reduce(self.flat, async_op=True)

    def end(self) -> None:
        """Put the averages in the gradients' place; where no rank has one, none is made."""
        for view, p, count in zip(self._views, self.parameters, self._counts.tolist(), strict=True):
            if not count:
                continue
            if p.grad is None:
                p.grad = torch.empty_like(p)
            p.grad.copy_(view)


class Buckets:
    """The gradients of all parameters.

    Args:
        parameters: the same in the same order on all ranks.
        cap_mb: MiB of gradients in a bucket; a parameter that is larger has one of its own.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], cap_mb: float) -> None:
        by_kind = sorted(parameters, key=_kind)  # stable: else in their order
        self.buckets = [Bucket(some) for _, group in groupby(by_kind, _kind) for some in _filled(group, cap_mb * 2**20)]

    @torch.no_grad()
    def average(self) -> None:
        """Replace each gradient by its mean over the ranks; a rank that has none counts as one of zeros."""
        world_size = dist.get_world_size()
        if world_size == 1:
            return
        works = [bucket.begin(world_size) for bucket in self.buckets]  # one is filled while others travel
        for work, bucket in zip(works, self.buckets, strict=True):
            assert work is not None
            work.wait()
            bucket.end()


def _kind(p: Tensor) -> str:
    return f"{p.dtype} {p.device}"


def _filled(parameters: Iterable[nn.Parameter], cap: float) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    for p in parameters:
        if bucket and sum(other.nbytes for other in bucket) + p.nbytes > cap:
            yield bucket
            bucket = []
        bucket.append(p)
    yield bucket
