"""Stand-in rows for a batch without rows, which many nets can't take, such as most of transformers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

from apprentice import keyed
from apprentice.private import tree_map_only

Result = TypeVar("Result")
_computing: ContextVar[bool] = ContextVar("computing", default=False)


def run_without_rows(compute: Callable[[Tensor], Result], inputs: Tensor) -> Result:
    """Return what a net computes for inputs (0, ...), by computing two stand-in rows, which count nowhere."""
    rows = torch.arange(2, device=inputs.device)  # two, as torch's BatchNorm refuses one
    shape = inputs.shape[1:]
    noise = keyed.bits(0, rows, shape.numel()).view(-1, *shape) / 2**32  # below 1: integers are all 0
    with _mark_stand_ins(), keyed.noise(0, 0, rows):
        outputs = compute(noise.to(inputs.dtype))
    no_rows: Result = tree_map_only(Tensor, lambda x: x[:0], outputs)
    return no_rows


def drop_stand_ins(x: Tensor) -> Tensor:
    """Return the rows of x (b, ...) that count in statistics: all, or none if they are stand-ins."""
    return x[:0] if _computing.get() else x


@contextmanager
def _mark_stand_ins() -> Iterator[None]:
    token = _computing.set(True)
    try:
        yield
    finally:
        _computing.reset(token)
