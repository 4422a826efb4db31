"""Packs the tensors between two stages, of any types and memory formats, into one flat buffer, bit by bit.

torch's pipeline expects contiguous tensors of the same shapes for every micro-batch, each with a gradient.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from apprentice.errors import BadInput

UNIT = torch.float32  # a type with gradients, for four bytes of any type
ALIGNMENT = 4  # units


@dataclass(frozen=True)
class Layout:
    """Describes a tensor to the rank that will receive it."""

    row: tuple[int, ...]  # shape without the first dimension, the rows
    order: tuple[int, ...]  # dimensions by stride, the outermost first
    dtype: torch.dtype
    differentiable: bool  # whether a gradient goes back

    @classmethod
    def of(cls, x: Tensor) -> "Layout":
        """Return the layout of a tensor, made dense."""
        strides = torch.empty_like(x, device="meta").stride()
        order = tuple(sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim)))
        return cls(tuple(x.shape[1:]), order, x.dtype, x.requires_grad)

    def units(self, rows: int) -> int:
        """Units that so many rows take."""
        size = -(-rows * prod(self.row) * self.dtype.itemsize // UNIT.itemsize)
        return -(-size // ALIGNMENT) * ALIGNMENT

    def view(self, buffer: Tensor, start: int, rows: int) -> Tensor:
        """(rows, *row), the tensor at unit `start` of the buffer; it shares memory, but no history."""
        shape = rows, *self.row
        strides = torch.empty_permuted(shape, self.order, device="meta").stride()
        begin = (buffer.storage_offset() + start) * UNIT.itemsize // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return empty.set_(buffer.untyped_storage(), begin, shape, strides)


class Packing:
    """Packs tensors of known layouts, with at most `capacity` rows."""

    def __init__(self, layouts: Sequence[Layout], capacity: int) -> None:
        self.layouts = tuple(layouts)
        *self.starts, self.units = itertools.accumulate((x.units(capacity) for x in layouts), initial=0)
        self.differentiable = any(layout.differentiable for layout in layouts)

    def pack(self, tensors: Sequence[Tensor], anchor: Tensor) -> Tensor:
        """(units,) a buffer with a gradient, of `anchor` if of no other tensor; BadInput for other layouts."""
        self.check(tensors)
        return cast("Tensor", _Pack.apply(self, anchor, *tensors))

    def check(self, tensors: Sequence[Tensor]) -> None:
        got = [(tuple(x.shape[1:]), x.dtype) for x in tensors]
        expected = [(layout.row, layout.dtype) for layout in self.layouts]
        if got != expected:
            to_give = f"a stage to give {_describe(expected)} for every micro-batch"
            raise BadInput("", "pipeline_stages", f"{to_give}, got {_describe(got)}")

    def unpack(self, buffer: Tensor, rows: int) -> tuple[Tensor, ...]:
        """Return the tensors, with so many rows."""
        return cast("tuple[Tensor, ...]", _Unpack.apply(self, rows, buffer))

    def pack_detached(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """(units,) a buffer without history; zeros for None."""
        buffer = torch.empty(self.units, dtype=UNIT, device=next(x.device for x in tensors if x is not None))
        if any(x is None for x in tensors):
            buffer.zero_()
        for x, layout, start in zip(tensors, self.layouts, self.starts, strict=True):
            if x is not None:
                layout.view(buffer, start, len(x)).copy_(x)
        return buffer

    def views(self, buffer: Tensor, rows: int) -> list[Tensor]:
        """Return the tensors, without history."""
        return [layout.view(buffer, start, rows) for layout, start in zip(self.layouts, self.starts, strict=True)]


def _describe(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return " and ".join(f"(rows, {', '.join(map(str, row))}) {str(dtype)[6:]}" for row, dtype in kinds) or "nothing"


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packing: Packing, _anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.packing, ctx.rows = packing, len(tensors[0])
        return packing.pack_detached(tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = ctx.packing.views(grad, ctx.rows)
        pairs = zip(grads, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(grad if is_needed else None for grad, is_needed in pairs)


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packing: Packing, rows: int, buffer: Tensor) -> tuple[Tensor, ...]:
        ctx.packing = packing
        ctx.set_materialize_grads(False)
        tensors = packing.views(buffer, rows)
        layouts = zip(tensors, packing.layouts, strict=True)
        ctx.mark_non_differentiable(*(x for x, layout in layouts if not layout.differentiable))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, ctx.packing.pack_detached(grads)
