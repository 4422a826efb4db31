"""Randomness as a function of keys, such as seed, step and row, instead of a generator's state.

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

from apprentice.private import DropoutNd

T = TypeVar("T")
Ints = TypeVar("Ints", int, Tensor)
MASK = 0xFFFFFFFF


def mix(x: Ints) -> Ints:
    """Hash a 32-bit integer, or each element of an int64 tensor of such, to 32 bits."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def fold_in(*keys: int) -> int:
    """One 32-bit key from several integers; their order matters, and all their bits."""
    state = 0x9E3779B9
    for key in keys:
        for word in (key & MASK, (key >> 32) & MASK):
            state = mix((state * 31 + word + 0x9E3779B9) & MASK)
    return state


def bits(key: int, rows: Tensor, columns: int = 1) -> Tensor:
    """(len(rows), columns) int64 random values in [0, 2**32); row r depends on `key` and `rows[r]` alone."""
    row_keys = mix((rows * 0x9E3779B1 + key) & MASK)
    column_keys = mix(torch.arange(1, columns + 1, device=rows.device) * 0x85EBCA6B & MASK)
    return mix(row_keys[:, None] ^ column_keys)


def permutation(size: int, *keys: int) -> Tensor:
    """(size,) int64, a random order that depends on the keys alone."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(fold_in(*keys)))


def with_seed(seed: int, make: Callable[[], T]) -> T:
    """Call `make` with torch, numpy and `random` seeded, then restore their states."""
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - other people's nets draw from it
    try:
        with torch.random.fork_rng(devices=[]):
            reseed(seed)
            return make()
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002


def reseed(seed: int) -> None:
    """Seed torch on the CPU, numpy and `random`."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would reseed the GPUs too
    random.seed(seed)
    np.random.seed(fold_in(seed))  # noqa: NPY002 - it takes 32 bits


class _Context:
    """The seed, the step and the rows of the global batch that keyed layers draw for."""

    def __init__(self, seed: int, step: int, rows: Tensor) -> None:
        self.seed, self.step, self.rows = seed, step, rows
        self.parts: dict[tuple[int, int], _Context] = {}
        self.masks: dict[tuple, Tensor] = {}  # nets of equal shape share a mask: it is made once a step

    def keep(self, layer: int, columns: int, p: float) -> Tensor:
        if (layer, columns, p) not in self.masks:
            drawn = bits(fold_in(self.seed, self.step, layer), self.rows, columns)
            self.masks[layer, columns, p] = drawn >= round(p * 2**32)
        return self.masks[layer, columns, p]


_noise: ContextVar[_Context | None] = ContextVar("noise", default=None)


def noise(seed: int, step: int, rows: Tensor) -> AbstractContextManager:
    """Keyed layers inside draw for these rows (b,) int64 of the global batch number `step`."""
    return _within(_Context(seed, step, rows))


@contextmanager
def _within(context: _Context | None) -> Iterator[None]:
    token = _noise.set(context)
    try:
        yield
    finally:
        _noise.reset(token)


def part(start: int, stop: int) -> Callable[[], AbstractContextManager]:
    """Makes contexts in which keyed layers draw for a slice of the current context's rows, such as a microbatch."""
    context = _noise.get()
    if context is not None:
        part = _Context(context.seed, context.step, context.rows[start:stop])
        context = context.parts.setdefault((start, stop), part)
    return partial(_within, context)


class Dropout(nn.Module):
    """Dropout whose mask depends on seed, step, layer and row of the global batch alone.

    Inside `noise(...)` it is keyed; outside, such as in a notebook, it is torch's own dropout.

    Args:
        p: probability of a zero.
        layer: tells the dropout layers of one net apart.
        channels: drop whole channels of maps (B, C, H, W), as `nn.Dropout2d` does.

    Raises:
        ValueError: `p` is not in [0, 1), or the input has another number of rows than the context.
    """

    def __init__(self, p: float = 0.5, layer: int = 0, channels: bool = False) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"p {p}: expected at least 0, less than 1")
        self.p, self.layer, self.channels = p, layer, channels

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self._dropped(x) if self.training and self.p else x

    @torch.compiler.disable  # it would compile a kernel for each step's number, and a slow one
    def _dropped(self, x: Tensor) -> Tensor:
        context = _noise.get()
        if context is None:
            return (F.dropout2d if self.channels else F.dropout)(x, self.p, training=True)
        if len(x) != len(context.rows):
            raise ValueError(f"keyed dropout got {len(x)} rows, expected the {len(context.rows)} of the step's context")
        dropped = x[:, :, :1, :1] if self.channels else x
        keep = context.keep(self.layer, dropped[:1].numel() if len(x) else 1, self.p)
        return x * keep.to(x.device).view_as(dropped) / (1 - self.p)  # a split module's layers are on several devices

    def extra_repr(self) -> str:  # noqa: D102
        return f"p={self.p}, layer={self.layer}"


def unkeyed(module: nn.Module) -> list[str]:
    """Names of the layers in training mode that draw noise from torch's own generator."""
    return [name for name, layer in module.named_modules() if layer.training and _rate(layer) > 0]


def _rate(layer: nn.Module) -> float:
    if isinstance(rate := getattr(layer, "dropout", None), (int, float)):  # attention and recurrent layers
        return float(rate)
    return float(getattr(layer, "p", 0.0)) if is_dropout(layer) and not isinstance(layer, Dropout) else 0.0


def is_dropout(layer: nn.Module) -> bool:
    """Whether the layer is dropout of any kind, keyed or torch's, and nothing else."""
    # torchvision's StochasticDepth is known by its name: importing torchvision is slow
    return isinstance(layer, Dropout | DropoutNd) or type(layer).__name__ == "StochasticDepth"
