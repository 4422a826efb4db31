"""Sums of gradients that don't depend on the order of the addends.

A number is split into digits of W bits on a grid of powers of two that is the same for all numbers. Digits of one place
are added in the gradients' own floating type; W is small enough that a sum of N digits is never rounded. This is
reproducible summation (Demmel and Nguyen 2013; Ahrens, Demmel and Nguyen, ReproBLAS).
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from apprentice import replicas

# By type: bits of the integers that it holds, the exponent of its smallest number, and a sum's error, as the negative
# exponent of a fraction of a parameter's largest gradient.
TYPES = {torch.float32: (24, -149, 40), torch.float64: (53, -1074, 50)}
NONE, FLAW = 0, 2**16  # in place of a parameter's highest digit: no gradient at all; one that is not finite
CHUNK = 2**16  # numbers that stay in a core's cache from one operation to the next
GPU_CHUNK = 2**24  # numbers at once on a GPU, whose kernels cost their launch


class FixedPointSum:
    """The sum of the parameters' gradients over all shards and ranks, with the same bits in any order.

    A parameter keeps its highest digits only, starting with that of the largest element of any shard's gradient. What a
    gradient adds to a digit depends on nothing else. When a larger gradient comes, here or on another rank, the digits
    move to make room, the lowest are dropped, and the result is as if it had come first. An element's sum is right to
    2^-40 of its parameter's largest gradient, to 2^-50 in float64. Every finite gradient can be added.

    Args:
        parameters: whose `.grad` is added, by name; complex ones raise ValueError.
        addends: maximum number of gradients of one parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], addends: int) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        if found := [name for name, p in parameters.items() if p.is_complex()]:
            raise ValueError(f"--exact: expected real parameters; {found[0]} is complex")
        device = self.parameters[0].device
        wide = torch.float64 if any(p.dtype == torch.float64 for p in self.parameters) else torch.float32
        bits, self._lowest, right = TYPES[wide]
        carry = (addends - 1).bit_length()  # bits by which a sum is longer than its addends
        self._width = bits - carry
        self._kept = 1 + -(-(right - 1 + carry) // self._width)
        self._sizes = [p.numel() for p in self.parameters]
        self._starts = [0, *itertools.accumulate(self._sizes)]
        self._used = self._kept * self._starts[-1]
        self._vector = torch.empty(self._used, dtype=wide, device=device)  # the highest digits of all, the next, ...
        self.clear()
        self._packed = torch.zeros(self._starts[-1], dtype=wide, device=device)
        self._pieces = self._packed.split(self._sizes)
        self._views = [  # each with the shape and the strides of its parameter
            piece.as_strided(p.shape, torch.empty_like(p, device="meta").stride(), piece.storage_offset())
            for piece, p in zip(self._pieces, self.parameters, strict=True)
        ]
        self._chunk = CHUNK if device.type == "cpu" else min(GPU_CHUNK, max(self._starts[-1], 1))
        self._rounded = torch.empty(self._chunk, dtype=wide, device=device)

    @property
    def _digits(self) -> Tensor:
        """(digits kept, elements of all parameters)."""
        return self._vector[: self._used].view(self._kept, -1)

    def clear(self) -> None:
        """Start a new sum."""
        self._vector.zero_()
        self._highest = [NONE] * len(self.parameters)  # the place of the highest digit that is kept

    @torch.no_grad()
    def add(self) -> None:
        """Add each parameter's gradient and set it to None; ValueError for a sparse one, whose sum would be dense."""
        grads = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        if not grads:
            return
        if sparse := [self.names[i] for i, grad in grads.items() if grad.layout != torch.strided]:
            raise ValueError(f"--exact: expected dense gradients; that of {sparse[0]} is sparse")
        for p in self.parameters:
            p.grad = None
        pieces = self._pieces
        torch._foreach_copy_([self._views[i] for i in grads], list(grads.values()))
        found = dict(zip(grads, self._places([pieces[i] for i in grads]), strict=True))
        self._make_room([found.get(i, NONE) for i in range(len(pieces))])
        found = {i: place for i, place in found.items() if self._highest[i] != FLAW}
        if found:
            scales = [math.ldexp(1.0, -self._lowest - place * self._width) for place in found.values()]
            torch._foreach_mul_([pieces[i] for i in found], scales)
        # Add neighbours that start with the same of the kept digits at once; skip those that have none of these digits.
        skipped = [self._highest[i] - found[i] if i in found else self._kept for i in range(len(pieces))]
        for skip, group in itertools.groupby(range(len(pieces)), skipped.__getitem__):
            members = list(group)
            if skip < self._kept:
                self._add(self._starts[members[0]], self._starts[members[-1] + 1], skip)

    def _places(self, pieces: Sequence[Tensor]) -> list[int]:
        """The place of each piece's highest digit, at least that of the highest digit when the lowest are kept."""
        ends = [end for piece in pieces for end in (piece.aminmax() if len(piece) else piece.new_zeros(2))]
        largest = torch.stack(ends).abs().view(-1, 2).amax(1).tolist()
        return [
            max((math.frexp(x)[1] - 1 - self._lowest) // self._width if x else 0, self._kept - 1)
            if math.isfinite(x)
            else FLAW
            for x in largest
        ]

    def _make_room(self, places: Sequence[int]) -> None:
        """Keep each parameter's digits from its place on, if that is higher than before."""
        for i, (place, before) in enumerate(zip(places, self._highest, strict=True)):
            if place <= before:
                continue
            self._highest[i] = place
            if before != NONE:
                digits = self._digits[:, self._starts[i] : self._starts[i + 1]]
                rise = min(place - before, self._kept)
                digits.copy_(torch.cat([torch.zeros_like(digits[:rise]), digits[: self._kept - rise]]))

    def _add(self, start: int, stop: int, skip: int) -> None:
        """Add elements in units of their highest digit, which has `skip` kept digits above it."""
        for begin in range(start, stop, self._chunk):
            end = min(begin + self._chunk, stop)
            rest, digit = self._packed[begin:end], self._rounded[: end - begin]
            *higher, last = self._digits[skip:, begin:end].unbind()
            for total in higher:
                total.add_(torch.round(rest, out=digit))
                rest.sub_(digit).mul_(2.0**self._width)  # both exact
            last.add_(rest.round_())

    def reduce(self, bits: Tensor) -> Tensor:
        """Add up the sums of all replicas.

        Returns the sum of `bits`, float64 numbers each of which is nonzero on at most one replica.
        """
        if replicas.count() == 1:
            return bits
        self._make_room(replicas.all_reduce_max_(torch.tensor(self._highest, device=bits.device)).tolist())
        length = self._used + 4 * bits.numel()
        if len(self._vector) != length:
            self._vector = torch.cat([self._vector[: self._used], self._vector.new_empty(length - self._used)])
        self._vector[self._used :] = bits.flatten().view(torch.int16)  # which both types hold and add exactly
        replicas.all_reduce_sum_(self._vector)
        return self._vector[self._used :].to(torch.int16).view(torch.float64).view_as(bits)

    def flawed(self) -> list[str]:
        """Names of the parameters with a gradient that was not finite."""
        return [name for name, place in zip(self.names, self._highest, strict=True) if place == FLAW]

    def divided(self, divisor: float) -> list[Tensor | None]:
        """The sums over `divisor`, each in its parameter's type; None without a gradient or with a flaw."""
        found: list[Tensor | None] = [None] * len(self._highest)
        for i, place in enumerate(self._highest):
            if place in {NONE, FLAW}:
                continue
            sums = found[i] = torch.empty_like(self.parameters[i], device=self._vector.device, requires_grad=False)
            flat = sums.as_strided((self._sizes[i],), (1,))
            unit = math.ldexp(1.0, self._lowest + (place - self._kept + 1) * self._width)
            digits = self._digits[:, self._starts[i] : self._starts[i + 1]].split(self._chunk, 1)
            # In chunks, as float64 takes twice the memory.
            for into, (first, *lower) in zip(flat.split(self._chunk), map(Tensor.unbind, digits), strict=True):
                total = first.double()
                for digit in lower:
                    total.mul_(2.0**self._width).add_(digit)
                into.copy_(total.mul_(unit).div_(divisor))
        return found
