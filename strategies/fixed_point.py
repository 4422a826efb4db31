"""Sums of gradients in 64-bit integers, in which the order of the addends does not matter."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from apprentice import replicas

UNIT = 2.0**44  # what stands for a gradient of 1: resolution 6e-14, range 3e4 for 8 addends
FLAW = 2**32  # added to a parameter's count for a gradient that is not finite or out of range
CHUNK = 2**16  # numbers that stay in a core's own cache from one operation to the next


class FixedPointSum:
    """The sum of the parameters' gradients over all shards of a batch and all ranks, with the same bits in any order.

    One int64 vector holds the elements of each parameter, in its own memory order, and then a count of gradients a
    parameter, in which a flaw shows; so one collective adds up all.

    Args:
        parameters: whose `.grad` is added, by name.
        addends: how many gradients of one parameter are added up at most; it bounds the range, so that no sum wraps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], addends: int) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.limit = 2.0**62 / UNIT / addends
        device = self.parameters[0].device
        wide = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        self._numbers = sum(p.numel() for p in self.parameters)
        self._used = self._numbers + len(self.parameters)
        self._packed = torch.zeros(self._numbers, dtype=wide, device=device)
        self._rounded = torch.empty(CHUNK, dtype=torch.int64, device=device)
        self._vector = torch.zeros(self._used, dtype=torch.int64, device=device)

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat vector, each with the shape and the strides of its parameter."""
        pieces = flat[: self._numbers].split([p.numel() for p in self.parameters])
        return [
            piece.as_strided(p.shape, _dense(p), piece.storage_offset())
            for piece, p in zip(pieces, self.parameters, strict=True)
        ]

    @property
    def _counts(self) -> Tensor:
        return self._vector[self._numbers : self._used]

    def clear(self) -> None:
        """Begin a new sum."""
        self._vector.zero_()

    @torch.no_grad()
    def add(self) -> None:
        """Add each parameter's gradient, and take it away from the parameter."""
        there = [i for i, p in enumerate(self.parameters) if p.grad is not None]
        if not there:
            return
        grads = [p.grad for p in self.parameters if p.grad is not None]
        for p in self.parameters:
            p.grad = None
        if len(there) < len(self.parameters):
            self._packed.zero_()
        views = self._views(self._packed)
        torch._foreach_copy_([views[i] for i in there], grads)
        self._counts[there] += 1
        if not torch.stack(self._packed.aminmax()).abs().max() <= self.limit:  # true of a NaN as well
            largest = torch.stack([grad.abs().max().double() for grad in grads])
            self._counts[there] += torch.where(largest <= self.limit, 0, FLAW)
        totals = self._vector[: self._numbers].split(CHUNK)
        for total, packed in zip(totals, self._packed.split(CHUNK), strict=True):
            packed.mul_(UNIT).round_()  # a power of two is exact in every floating type
            total.add_(self._rounded[: len(packed)].copy_(packed))

    def reduce(self, bits: Tensor) -> Tensor:
        """Add up the sums of all replicas.

        Args:
            bits: float64 numbers, each other than zero on one replica at most; they travel along.

        Returns:
            These numbers, of all replicas.
        """
        if replicas.count() == 1:
            return bits
        if len(self._vector) != self._used + bits.numel():
            self._vector = torch.cat([self._vector[: self._used], self._vector.new_empty(bits.numel())])
        self._vector[self._used :] = bits.flatten().view(torch.int64)
        replicas.add_up(self._vector)
        return self._vector[self._used :].view(torch.float64).view_as(bits)

    def flawed(self) -> list[str]:
        """Names of the parameters of which some gradient was not finite or out of range."""
        return [name for name, count in zip(self.names, self._counts.tolist(), strict=True) if count >= FLAW]

    def divided(self, divisor: float) -> list[Tensor | None]:
        """The sums over `divisor`, each in its parameter's type; None where there was no gradient at all."""
        flat = self._vector[: self._numbers].double().div_(UNIT * divisor)
        return [
            view.to(p.dtype) if count else None
            for view, p, count in zip(self._views(flat), self.parameters, self._counts.tolist(), strict=True)
        ]


def _dense(p: Tensor) -> Sequence[int]:
    """The strides of a tensor that fills its memory, in the order of `p`'s."""
    return torch.empty_like(p, device="meta").stride()
