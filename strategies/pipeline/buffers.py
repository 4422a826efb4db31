"""What travels from stage to stage: the tensors of a micro-batch in one flat tensor, bit by bit.

torch's pipeline wants the same number of tensors of the same shapes for every micro-batch, each with a gradient, and
contiguous. A parcel is that whatever it holds: any number of tensors of any types, some without gradients, with fewer
rows than there is room for. Each arrives with the bits and the memory format it was sent with, and so do gradients.
"""

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNIT = torch.float32  # only a name for four bytes: nothing is computed with a parcel
ALIGNED = 4  # units


class Layout(NamedTuple):
    """What is known of a tensor before it comes.

    Attributes:
        row: its shape but for the first dimension, the rows.
        order: its dimensions as they lie in memory, the outermost first.
        dtype: its type.
        differentiable: whether a gradient goes back.
    """

    row: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    @classmethod
    def of(cls, x: Tensor) -> "Layout":
        """The layout of a tensor, which becomes dense if it is not."""
        strides = torch.empty_like(x, device="meta").stride()
        order = tuple(sorted(range(x.dim()), key=lambda dim: (-strides[dim], dim)))
        return cls(tuple(x.shape[1:]), order, x.dtype, x.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """Without rows: (0, *row)."""
        return torch.empty(0, *self.row, dtype=self.dtype, device=device)

    def units(self, rows: int) -> int:
        """Room for so many rows."""
        size = -(-rows * prod(self.row) * self.dtype.itemsize // UNIT.itemsize)
        return -(-size // ALIGNED) * ALIGNED

    def inside(self, parcel: Tensor, start: int, rows: int) -> Tensor:
        """(rows, *row), the tensor that lies in the parcel from unit `start` on; it shares memory, but no history."""
        shape = rows, *self.row
        strides = torch.empty_permuted(shape, self.order, device="meta").stride()
        begin = (parcel.storage_offset() + start) * UNIT.itemsize // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=parcel.device)
        return empty.set_(parcel.untyped_storage(), begin, shape, strides)


class Packing:
    """How tensors are packed.

    Args:
        layouts: of the tensors.
        capacity: the most rows that will come.
    """

    def __init__(self, layouts: Sequence[Layout], capacity: int) -> None:
        self.layouts = tuple(layouts)
        self.starts = [0, *itertools.accumulate(layout.units(capacity) for layout in layouts)]

    @property
    def units(self) -> int:
        """The length of a parcel."""
        return self.starts[-1]

    @property
    def differentiable(self) -> bool:
        """Whether any gradient goes back."""
        return any(layout.differentiable for layout in self.layouts)

    def pack(self, tensors: Sequence[Tensor], anchor: Tensor) -> Tensor:
        """A parcel (units,); it requires a gradient in any case, of `anchor` if of nothing else.

        Raises:
            ValueError: tensors unlike those that the layouts were made of.
        """
        self.check(tensors)
        return _Pack.apply(self, anchor, *tensors)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError where tensors are unlike those that the layouts were made of."""
        found = [(tuple(x.shape[1:]), x.dtype) for x in tensors]
        expected = [(layout.row, layout.dtype) for layout in self.layouts]
        if found != expected:
            raise ValueError(
                f"expected a stage to give {_listed(expected)} for every micro-batch, got {_listed(found)}"
            )

    def unpack(self, parcel: Tensor, rows: int) -> tuple[Tensor, ...]:
        """The tensors, of so many rows."""
        return _Unpack.apply(self, rows, parcel)

    def bare(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A parcel without history; zeros where a tensor is missing."""
        some = next(x for x in tensors if x is not None)
        parcel = torch.empty(self.units, dtype=UNIT, device=some.device)
        for x, layout, (start, stop) in zip(tensors, self.layouts, itertools.pairwise(self.starts), strict=True):
            if x is None:
                parcel[start:stop].zero_()
            else:
                layout.inside(parcel, start, len(x)).copy_(x)
        return parcel

    def opened(self, parcel: Tensor, rows: int) -> list[Tensor]:
        """The tensors in it, without history."""
        return [layout.inside(parcel, start, rows) for layout, start in zip(self.layouts, self.starts, strict=False)]


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packing: Packing, _anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.packing, ctx.rows = packing, len(tensors[0])
        return packing.bare(tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads = ctx.packing.opened(grad, ctx.rows)
        return None, None, *(g if wanted else None for g, wanted in zip(grads, ctx.needs_input_grad[2:], strict=True))


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packing: Packing, rows: int, parcel: Tensor) -> tuple[Tensor, ...]:
        ctx.packing = packing
        ctx.set_materialize_grads(False)
        tensors = packing.opened(parcel, rows)
        layouts = zip(tensors, packing.layouts, strict=True)
        ctx.mark_non_differentiable(*(x for x, layout in layouts if not layout.differentiable))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, ctx.packing.bare(grads)


def _listed(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    shapes = (f"(rows, {', '.join(map(str, row))}) {str(dtype).removeprefix('torch.')}" for row, dtype in tensors)
    return " and ".join(shapes) or "nothing"
