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

from apprentice.errors import BadInput

T = TypeVar("T")
Ints = TypeVar("Ints", int, Tensor)
MASK = 0xFFFFFFFF
TORCH_DROPOUTS = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout


def mix(x: Ints) -> Ints:
    """Hash a 32-bit integer, or each element of an int64 tensor of such, to 32 bits."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def fold_in(*keys: int) -> int:
    """Hash several integers to one 32-bit key; their order matters, and all their bits."""
    state = 0x9E3779B9
    for key in keys:
        for word in (key & MASK, (key >> 32) & MASK):
            state = mix((state * 31 + word + 0x9E3779B9) & MASK)
    return state


def bits(key: int, rows: Tensor, columns: int = 1) -> Tensor:
    """Return (len(rows), columns) int64 random values in [0, 2**32); row r depends on `key` and `rows[r]` alone."""
    row_keys = mix((rows * 0x9E3779B1 + key) & MASK)
    column_keys = mix(torch.arange(1, columns + 1, device=rows.device) * 0x85EBCA6B & MASK)
    return mix(row_keys[:, None] ^ column_keys)


def permutation(size: int, *keys: int) -> Tensor:
    """Return (size,) int64, a random order that depends on the keys alone."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(fold_in(*keys)))


def with_seed(seed: int, make: Callable[[], T]) -> T:
    """Call `make` with torch, numpy and `random` seeded, then restore their states."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - other people's nets use it
    try:
        with torch.random.fork_rng(devices=[]):
            reseed(seed)
            return make()
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def reseed(seed: int) -> None:
    """Seed torch on the CPU, numpy and `random`."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would reseed the GPUs too
    random.seed(seed)
    np.random.seed(fold_in(seed))  # noqa: NPY002 - it takes 32 bits


class _Context:
    """The seed, the step and the rows of the global batch that keyed layers draw for."""

    def __init__(self, seed: int, step: int, rows: Tensor) -> None:
        self.seed, self.step, self.rows = seed, step, rows
        self.slices: dict[tuple[int, int | None, int], _Context] = {}
        self.masks: dict[tuple[int, int, float], Tensor] = {}  # nets of equal shape share a mask

    def mask(self, layer: int, columns: int, p: float) -> Tensor:
        """Return (b, columns) bool, false with probability p."""
        if (layer, columns, p) not in self.masks:
            drawn = bits(fold_in(self.seed, self.step, layer), self.rows, columns)
            self.masks[layer, columns, p] = drawn >= round(p * 2**32)
        return self.masks[layer, columns, p]


_noise: ContextVar[_Context | None] = ContextVar("noise", default=None)


def noise(seed: int, step: int, rows: Tensor) -> AbstractContextManager[None]:
    """Inside, keyed layers draw for these rows, (b,) int64, of the global batch number `step`."""
    return _within(_Context(seed, step, rows))


@contextmanager
def _within(context: _Context | None) -> Iterator[None]:
    token = _noise.set(context)
    try:
        yield
    finally:
        _noise.reset(token)


def slice_rows(start: int, stop: int | None, parts: int = 1) -> Callable[[], AbstractContextManager[None]]:
    """Return a maker of contexts in which keyed layers draw for a slice of the current rows, or for parts of each."""
    context = _noise.get()
    if context is not None:
        rows = context.rows[start:stop, None] * parts + torch.arange(parts).to(context.rows)
        context = context.slices.setdefault((start, stop, parts), _Context(context.seed, context.step, rows.flatten()))
    return partial(_within, context)


class Dropout(nn.Module):
    """Dropout whose mask is a function of seed, step, layer and row of the global batch.

    Inside `noise(...)` it is keyed; outside, such as in a notebook, it is torch's own dropout.

    Args:
        p: probability of a zero.
        layer: number of the layer among the dropout layers of a net.
        channels: drop whole channels of maps (B, C, H, W), as `nn.Dropout2d` does.

    Raises:
        BadInput: `p` is not in [0, 1).
        ValueError: the input has another number of rows than the context.
    """

    def __init__(self, p: float = 0.5, layer: int = 0, channels: bool = False) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise BadInput("dropout", p, "at least 0, less than 1")  # as options of nets call it
        self.p, self.layer, self.channels = p, layer, channels

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self._drop(x) if self.training and self.p else x

    # The compiler would make a kernel for each step's number, and a slow one; torch's decorator has no hints.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _drop(self, x: Tensor) -> Tensor:
        context = _noise.get()
        if context is None:
            return (F.dropout2d if self.channels else F.dropout)(x, self.p, training=True)
        if len(x) != len(context.rows):
            raise ValueError(f"keyed dropout got {len(x)} rows, expected the {len(context.rows)} of the step's context")
        units = x[:, :, :1, :1] if self.channels else x
        mask = context.mask(self.layer, units[:1].numel() if len(x) else 1, self.p)
        return x * mask.to(x.device).view_as(units) / (1 - self.p)  # a split module's layers are on several devices

    def extra_repr(self) -> str:  # noqa: D102
        return f"p={self.p}, layer={self.layer}"


class Jitter(nn.Module):
    """Multiplies inputs (b, ...) by uniform numbers of [1 - size, 1 + size] in training, keyed as `Dropout` is.

    Args:
        size: of the noise, in [0, 1).
        layer: number of the layer among those of its kind in a net.
    """

    def __init__(self, size: float, layer: int = 0) -> None:
        super().__init__()
        if not 0 <= size < 1:
            raise BadInput("noise", size, "at least 0, less than 1")
        self.size, self.layer = size, layer

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self._multiply(x) if self.training and self.size else x

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as in Dropout
    def _multiply(self, x: Tensor) -> Tensor:
        context = _noise.get()
        if context is None:
            return x * (1 - self.size + 2 * self.size * torch.rand_like(x))
        if len(x) != len(context.rows):
            raise ValueError(f"keyed noise got {len(x)} rows, expected the {len(context.rows)} of the step's context")
        key = fold_in(context.seed, context.step, self.layer, 1)  # of one integer more than a dropout's
        drawn = bits(key, context.rows, x[:1].numel() if len(x) else 1).to(x.device).double() / 2**32
        return x * (1 - self.size + 2 * self.size * drawn).to(x.dtype).view_as(x)

    def extra_repr(self) -> str:  # noqa: D102
        return f"size={self.size}, layer={self.layer}"


def find_unkeyed_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers in training mode that draw noise from torch's generator."""
    return [name for name, layer in module.named_modules() if layer.training and _unkeyed_rate(layer) > 0]


def _unkeyed_rate(layer: nn.Module) -> float:
    """Return the probability of a zero that a layer draws by itself."""
    if isinstance(rate := getattr(layer, "dropout", None), (int, float)):  # attention and recurrent layers
        return float(rate)
    return float(getattr(layer, "p", 0.0)) if is_dropout(layer) and not isinstance(layer, Dropout) else 0.0


def is_dropout(layer: nn.Module) -> bool:
    """Return whether the layer is dropout of any kind, keyed or torch's, and nothing else."""
    # torchvision's StochasticDepth is known by its name: importing torchvision is slow
    return isinstance(layer, (Dropout, *TORCH_DROPOUTS)) or type(layer).__name__ == "StochasticDepth"
