"""Sums of gradients that don't depend on the order of the addends.

A gradient is rounded to a grid that depends on nothing but its own size. Gradients of about one size share a float64
sum of whole numbers of one unit, which is never rounded; the few sums of a parameter are added in the end, from the
smallest unit on. This is reproducible summation (Demmel and Nguyen 2013; Ahrens, Demmel and Nguyen, ReproBLAS) whose
bins are chosen by whole gradients.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from apprentice import replicas
from apprentice.errors import BadInput

BITS = 53  # of the whole numbers that float64 holds
RIGHT = 40  # bits of a gradient that are kept, counted from its largest element
MOST_ADDENDS = 2 ** (BITS - RIGHT - 1)
LARGEST = 2.0**960  # elements below it can be rounded by an addition
NONE, ZERO, FLAW = -(2**16), 1 - 2**16, 2**16  # for a bin: no gradient, zeros alone, one that is not finite
CHUNK = 2**18  # numbers that stay in a processor's cache from one operation to the next
GPU_CHUNK = 2**24  # numbers at once on a GPU, whose kernels cost their launch


class FixedPointSum:
    """The sum of the parameters' gradients over all shards and ranks, with the same bits in any order.

    A gradient counts to 2^-40 of its largest element, so an element's mean is right to 2^-40 of its parameter's largest
    gradient. Of float64 gradients what is left is added once more in the same way. A gradient with an element of 2^960
    or more counts as not finite.

    Args:
        parameters: whose `.grad` is added, by name; complex ones raise BadInput.
        addends: maximum number of gradients of one parameter, up to MOST_ADDENDS.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], addends: int) -> None:
        self.names, self.parameters, self._addends = list(parameters), list(parameters.values()), addends
        for name, p in parameters.items():
            if p.is_complex():
                raise BadInput("exact", addends, f"real parameters; {name} is complex")
        carry = max((addends - 1).bit_length(), 2)  # bits by which a sum is longer than its addends; rounding takes 2
        self._width = BITS - RIGHT - carry  # powers of two that share a bin
        self._levels = 2 if any(p.dtype == torch.float64 for p in self.parameters) else 1
        self._strides = [torch.empty_like(p, device="meta").stride() for p in self.parameters]
        self._device, sizes = self.parameters[0].device, [p.numel() for p in self.parameters]
        self._chunks = _chunks(sizes, CHUNK if self._device.type == "cpu" else GPU_CHUNK)
        longest = max((sum(span.stop - span.start for _, span in chunk) for chunk in self._chunks), default=0)
        self._rounded = torch.empty(longest, dtype=torch.float64, device=self._device)
        self.clear()

    def clear(self) -> None:
        """Start a new sum."""
        self._sums: list[dict[int, Tensor]] = [{} for _ in self.parameters]  # (elements,) by bin
        self._highest = [NONE] * len(self.parameters)

    @torch.no_grad()
    def add(self) -> None:
        """Add each parameter's gradient and set it to None; BadInput for a sparse one, whose sum would be dense."""
        grads = {i: p.grad for i, p in enumerate(self.parameters) if p.grad is not None}
        if sparse := [self.names[i] for i, grad in grads.items() if grad.layout != torch.strided]:
            raise BadInput("exact", self._addends, f"dense gradients; that of {sparse[0]} is sparse")
        for p in self.parameters:
            p.grad = None
        flat = {i: self._flat(i, grad) for i, grad in grads.items()}
        bins = self._bins(flat)
        self._highest = [max(highest, bins.get(i, NONE)) for i, highest in enumerate(self._highest)]
        finite = {i for i, place in bins.items() if ZERO < place < FLAW}
        for chunk in self._chunks:
            members = [(i, span) for i, span in chunk if i in finite]
            pieces = [flat[i][span] for i, span in members]
            for level in range(self._levels if members else 0):
                below = level * (RIGHT // self._width)  # the bin of what a level leaves: less than half of its unit
                pieces = self._add(pieces, [(i, bins[i] - below, span) for i, span in members])

    def _flat(self, i: int, grad: Tensor) -> Tensor:
        """(elements,) in the order of the parameter's memory."""
        if grad.stride() != self._strides[i]:
            grad = torch.empty_like(self.parameters[i]).copy_(grad)
        return grad.as_strided((grad.numel(),), (1,))

    def _bins(self, grads: Mapping[int, Tensor]) -> dict[int, int]:
        """Return the bin of each gradient's largest element."""
        if not grads:
            return {}
        ends = [end for grad in grads.values() for end in (grad.aminmax() if len(grad) else grad.new_zeros(2))]
        largest = torch.stack(ends).abs().view(-1, 2).amax(1).tolist()
        bins = [FLAW if not x < LARGEST else (math.frexp(x)[1] - 1) // self._width if x else ZERO for x in largest]
        return dict(zip(grads, bins, strict=True))

    def _add(self, pieces: list[Tensor], places: Sequence[tuple[int, int, slice]]) -> list[Tensor]:
        """Add pieces of gradients to their bins; return what is left of them if it is needed."""
        rounded = self._rounded[: sum(map(len, pieces))].split([*map(len, pieces)])
        # Numbers of this size have the unit's multiples as their neighbours, so that adding them rounds.
        rounding = [1.5 * 2.0 ** (BITS - 1 - RIGHT + place * self._width) for _, place, _ in places]
        torch._foreach_copy_(rounded, pieces)
        torch._foreach_add_(rounded, rounding)
        torch._foreach_sub_(rounded, rounding)
        torch._foreach_add_([self._sum(i, place)[span] for i, place, span in places], rounded)
        return [*torch._foreach_sub(pieces, rounded)] if self._levels > 1 else []

    def _sum(self, i: int, place: int) -> Tensor:
        sums = self._sums[i]
        if place not in sums:
            sums[place] = torch.zeros(self.parameters[i].numel(), dtype=torch.float64, device=self._device)
        return sums[place]

    def reduce(self, bits: Tensor) -> Tensor:
        """Add up the sums of all replicas.

        Returns the sum of `bits`, float64 numbers each of which is nonzero on at most one replica.
        """
        if replicas.count() == 1:
            return bits
        lowest = [-min(sums, default=FLAW) for sums in self._sums]
        ends = torch.tensor([self._highest, lowest, [max(sums, default=NONE) for sums in self._sums]])
        self._highest, lowest, last = replicas.all_reduce_max_(ends.to(bits.device)).tolist()
        spans = enumerate(zip(lowest, last, strict=True))
        places = [(i, place) for i, (low, high) in spans for place in range(-low, high + 1)]
        sums = [*(self._sum(i, place) for i, place in places), bits.flatten()]
        summed_bits: Tensor
        *totals, summed_bits = replicas.all_reduce_sum_(torch.cat(sums)).split([*map(len, sums)])
        for (i, place), total in zip(places, totals, strict=True):
            self._sums[i][place] = total
        return summed_bits.view_as(bits)

    def flawed_names(self) -> list[str]:
        """Return the names of the parameters with a gradient that was not finite."""
        return [name for name, place in zip(self.names, self._highest, strict=True) if place == FLAW]

    def divide(self, divisor: float) -> list[Tensor | None]:
        """Divide the sums; each mean has its parameter's type, and is None without a gradient or with a flaw."""
        means: list[Tensor | None] = [None] * len(self._highest)
        for i, sums in enumerate(self._sums):
            if self._highest[i] in {NONE, FLAW}:
                continue
            mean = means[i] = torch.zeros_like(self.parameters[i], device=self._device, requires_grad=False)
            if sums:
                first, *larger = [sums[place] for place in sorted(sums)]
                mean.as_strided((len(first),), (1,)).copy_(sum(larger, first) / divisor)
        return means


def _chunks(sizes: Sequence[int], length: int) -> list[list[tuple[int, slice]]]:
    """Numbers and spans of tensors of these sizes, in chunks of about `length` elements and less than twice as many."""
    spans = [(i, slice(at, min(at + length, size))) for i, size in enumerate(sizes) for at in range(0, size, length)]
    ends = itertools.accumulate(span.stop - span.start for _, span in spans)
    chunks = itertools.groupby(zip(spans, ends, strict=True), lambda span_and_end: span_and_end[1] // length)
    return [[span for span, _ in chunk] for _, chunk in chunks]
