"""Randomness as a function of what it belongs to, not of how many draws came before.

Noise is a counter-based integer hash in tensor operations (lowbias32, C. Wellons, "Prospecting for Hash Functions",
2018): the same bits on every device, in any order, on any number of ranks.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

T = TypeVar("T")
MASK = 0xFFFFFFFF


def mix(x: Tensor) -> Tensor:
    """Hash each element of an int64 tensor of 32-bit values to a 32-bit value."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def fold_in(*keys: int) -> int:
    """One 32-bit key from several integers, in order; each key counts with all of its bits."""
    state = 0x9E3779B9
    for key in keys:
        for word in (key & MASK, (key >> 32) & MASK):
            x = (state * 31 + word + 0x9E3779B9) & MASK
            x ^= x >> 16
            x = (x * 0x7FEB352D) & MASK
            x ^= x >> 15
            x = (x * 0x846CA68B) & MASK
            state = x ^ (x >> 16)
    return state


def bits(key: int, rows: Tensor, columns: int = 1) -> Tensor:
    """(len(rows), columns) int64 random values in [0, 2**32), row r a function of `key` and `rows[r]` alone."""
    row_keys = mix((rows * 0x9E3779B1 + key) & MASK)
    column_keys = mix(torch.arange(1, columns + 1, device=rows.device) * 0x85EBCA6B & MASK)
    return mix(row_keys[:, None] ^ column_keys)


def permutation(size: int, *keys: int) -> Tensor:
    """(size,) int64, a random order that depends on the keys alone."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(fold_in(*keys)))


def with_seed(seed: int, make: Callable[[], T]) -> T:
    """What `make` makes with torch, numpy and `random` with_seed; their states are left as they were."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - from which others' nets draw
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would reseed the GPUs too
            random.seed(seed)
            np.random.seed(fold_in(seed))  # noqa: NPY002 - it takes 32 bits
            return make()
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


class _Noise:
    """Where noise is drawn now: seed, step and the rows of the global batch that are being computed."""

    def __init__(self, seed: int, step: int, rows: Tensor) -> None:
        self.seed, self.step, self.rows = seed, step, rows
        self.parts: dict[tuple[int, int], _Noise] = {}
        self.masks: dict[tuple, Tensor] = {}  # nets of equal shape draw equal noise: it is made once a step

    def keep(self, layer: int, columns: int, p: float) -> Tensor:
        if (layer, columns, p) not in self.masks:
            drawn = bits(fold_in(self.seed, self.step, layer), self.rows, columns)
            self.masks[layer, columns, p] = drawn >= round(p * 2**32)
        return self.masks[layer, columns, p]


_noise: ContextVar[_Noise | None] = ContextVar("noise", default=None)


@contextmanager
def noise(seed: int, step: int, rows: Tensor) -> Iterator[None]:
    """Keyed layers inside draw for these rows of the global batch.

    Args:
        seed: the run's seed.
        step: number of the global batch.
        rows: (b,) int64, the rows of the global batch that are computed here.
    """
    with _within(_Noise(seed, step, rows)):
        yield


@contextmanager
def _within(context: _Noise | None) -> Iterator[None]:
    token = _noise.set(context)
    try:
        yield
    finally:
        _noise.reset(token)


def part(start: int, stop: int) -> Callable[[], AbstractContextManager]:
    """What makes contexts in which keyed layers draw for some of the rows that this call's context has, if any.

    Args:
        start: first of these rows, counted from the context's first.
        stop: last + 1.
    """
    context = _noise.get()
    if context is not None:
        part = _Noise(context.seed, context.step, context.rows[start:stop])
        context = context.parts.setdefault((start, stop), part)
    return partial(_within, context)


class Dropout(nn.Module):
    """Dropout whose mask depends on seed, step, layer and row of the global batch, and on nothing else.

    Inside `noise(...)` it is keyed; outside, as in a notebook, it is torch's own dropout.

    Args:
        p: probability of a zero.
        layer: tells the dropout layers of one net apart.

    Raises:
        ValueError: `p` is not in [0, 1), or the input's first dimension is not that of the context's rows.
    """

    def __init__(self, p: float = 0.5, layer: int = 0) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p {p}: expected 0 <= p < 1")
        self.p, self.layer = p, layer

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self._dropped(x) if self.training and self.p else x

    @torch.compiler.disable  # of each step's number a kernel of its own would be made, and a slow one
    def _dropped(self, x: Tensor) -> Tensor:
        context = _noise.get()
        if context is None:
            return F.dropout(x, self.p, training=True)
        if len(x) != len(context.rows):
            raise ValueError(f"keyed dropout got {len(x)} rows, expected the {len(context.rows)} of the step's context")
        keep = context.keep(self.layer, x[:1].numel() if len(x) else 1, self.p)
        return x * keep.to(x.device).view_as(x) / (1 - self.p)  # of a split module another device's

    def extra_repr(self) -> str:  # noqa: D102
        return f"p={self.p}, layer={self.layer}"


def unkeyed(module: nn.Module) -> list[str]:
    """Names of the layers that in training draw noise from torch's own generator."""
    return [name for name, layer in module.named_modules() if layer.training and _rate(layer) > 0]


def _rate(layer: nn.Module) -> float:
    if isinstance(rate := getattr(layer, "dropout", None), (int, float)):  # of attention and of recurrent layers
        return float(rate)
    return float(getattr(layer, "p", 0.0)) if drops(layer) and not isinstance(layer, Dropout) else 0.0


def drops(layer: nn.Module) -> bool:
    """Whether that is all it does: dropout of any kind, keyed or torch's."""
    # torchvision's StochasticDepth goes by its name: to import torchvision takes longer than what is done here
    return isinstance(layer, Dropout | _DropoutNd) or type(layer).__name__ == "StochasticDepth"
