"""Linear attention (Katharopoulos et al. 2020, 2006.16236): a feature map of q and k in place of the softmax."""

import math
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.attention.chunks import Chunks, restart, scan
from lit_modules.nets.attention.recurrent import RecurrentMixer, State

FeatureMap = Literal["elu", "hedgehog", "taylor"]
# Added to each denominator. Published codes add 1e-6 (Katharopoulos et al.), 1e-10 (flash-linear-attention) or 1e-12
# (Based, LoLCATs), which is what sums of rather distant queries and keys are; this rounds away beside any above 1e-12.
EPSILON = 1e-20


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, starts: Tensor | None = None, least: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Token by token: S ← S + k [v, 1]ᵀ; o = q S without its last column, divided by that (see `normalise`).

    Args:
        q: (B, H, T, f), features φ(q) of queries.
        k: (B, H, T, f), of keys.
        v: (B, H, T, e), values.
        state: (B, H, f, e + 1), after the tokens before these; zeros if None.
        starts: (B, T) int64, where each token's text begins, below 0 for one that continues; None: all continue.
        least: the smallest value of φ(q)·φ(k).

    Returns:
        (B, H, T, e) and the state after the last token.
    """
    v, state = _with_ones(q, v, state)
    outputs = []
    for place, (query, key, value) in enumerate(zip(q.unbind(2), k.unbind(2), v.unbind(2), strict=True)):
        state = restart(state, starts, place) + key[..., :, None] * value[..., None, :]
        outputs.append((query[..., None, :] @ state)[..., 0, :])
    return normalise(torch.stack(outputs, 2), least), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, starts: Tensor | None = None, chunk: int = 64,
    least: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In chunks: Q S + tril(Q Kᵀ) V, and S ← S + Kᵀ V. As `recurrent`, in time and memory linear in T."""
    chunks = Chunks(q.shape[2], chunk, starts, q.device)
    v, state = _with_ones(q, v, state)
    q, k, v = chunks.cut(q), chunks.cut(k), chunks.cut(v)
    inside = (q @ k.mT * chunks.earlier) @ v
    factors = chunks.passes(q.new_ones(1, 1, q.shape[2], 1, 1))
    before, state = scan(factors, chunks.writes(k).mT @ v, state)
    return normalise(chunks.join(inside + chunks.reads(q) @ before), least), state


def parallel(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, starts: Tensor | None = None, least: float = 0.0
) -> tuple[Tensor, Tensor]:
    """All tokens at once, the weights (T, T) held: one chunk."""
    return chunked(q, k, v, state, starts, q.shape[2], least)


def unordered(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, least: float = 0.0) -> Tensor:
    """Without an order of tokens: S = Kᵀ [V, 1] over all of them, o = Q S without its last column, divided by that.

    Args:
        q: (B, H, T, f), features φ(q) of queries.
        k: (B, H, T, f), of keys.
        v: (B, H, T, e), values.
        mask: (B, T) bool, false for padding, which no token reads.
        least: the smallest value of φ(q)·φ(k).

    Returns:
        (B, H, T, e), in time and memory linear in T.
    """
    k = k if mask is None else k * mask[:, None, :, None]
    return normalise(q @ (k.mT @ F.pad(v, (0, 1), value=1.0)), least)


def _with_ones(q: Tensor, v: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append to values (B, H, T, e) a column of ones, whose sum is the denominator; make a missing state."""
    v = F.pad(v, (0, 1), value=1.0)
    return v, v.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if state is None else state


def normalise(x: Tensor, least: float | Tensor = 0.0) -> Tensor:
    """Divide (..., e + 1) by its last column, a sum of weights, plus EPSILON.

    Products of features may round to 0, all of a sum, or below `least`, which no such sum is less than; half of it is
    the least that is taken. So outputs and gradients are finite.
    """
    return x[..., :-1] / (x[..., -1:].clamp(min=least / 2) + EPSILON)


def normalise_weights(weights: Tensor, least: float | Tensor = 0.0) -> Tensor:
    """Divide weights (..., T) by their sum, as `normalise` does what they mix."""
    return normalise(torch.cat([weights, weights.sum(-1, keepdim=True)], -1), least)


class Elu(nn.Module):
    """φ(x) = elu(x) + 1 (Katharopoulos et al. 2020): (..., d) -> (..., d)."""

    least: ClassVar[float] = 0.0  # of φ(q)·φ(k)

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.width = head_dim

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x) + x.where(x <= 0, 0).exp()  # elu(x) + 1 rounds to 0 below -17


class Hedgehog(nn.Module):
    """φ(x) = softmax of [W x, -W x] (Zhang et al. 2024, 2402.04347), W of each head and first I: d -> 2 d."""

    least: ClassVar[float] = 0.0

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.width = 2 * head_dim
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))  # (H, d, d)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, T, d) -> (B, H, T, 2 d)."""
        x = x @ self.weight.mT.to(x.dtype)
        return torch.cat([x, -x], -1).softmax(-1)


class Taylor(nn.Module):
    """φ(q)·φ(k) = 1 + s + s² / 2, s = q·k / √d (Based, Arora et al. 2024, 2402.18668): d -> 1 + d + d²."""

    least: ClassVar[float] = 0.5  # where s = -1; rounded sums of large terms may be below

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.width = 1 + head_dim + head_dim**2

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        squares = (x[..., :, None] * x[..., None, :]).flatten(-2) / math.sqrt(2 * width)
        return torch.cat([torch.ones_like(x[..., :1]), x / width**0.25, squares], -1)


MAPS: dict[str, type[Elu | Hedgehog | Taylor]] = {"elu": Elu, "hedgehog": Hedgehog, "taylor": Taylor}


class LinearAttention(RecurrentMixer):
    """Attention with weights φ(q)·φ(k) / Σ φ(q)·φ(k); as it comes, causal, with a state (f, d + 1) a head.

    Not causal, a token attends to all, by one sum over tokens; the mask is (B, T) bool, false for padding.

    Args:
        embed_dim: D, width of tokens.
        num_heads: H, a divisor of D; heads have width d = D / H.
        feature_map: φ: `elu`, elu(x) + 1, f = d; `hedgehog`, a learnt softmax, f = 2 d; `taylor`, the exponential's
            series up to squares, f = 1 + d + d²: for narrow heads.
        conv: width of a causal convolution on q, k and v, see `ShortConvolution`; 0 for none.
        chunk: tokens of a chunk; the outputs don't depend on it.
        bias: whether the projections have one.
        causal: whether a token attends only to itself and earlier tokens.

    Raises:
        BadInput: a value can't be used; without an order of tokens, a convolution, a cache or a mask of texts.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feature_map: FeatureMap = "elu",
        conv: int = 0,
        chunk: int = 64,
        bias: bool = True,
        causal: bool = True,
    ) -> None:
        super().__init__(embed_dim, num_heads, conv, chunk, bias)
        if conv and not causal:
            raise BadInput("conv", conv, "0, but for causal attention: the convolution reads earlier tokens")
        self.causal = causal
        if feature_map not in MAPS:
            raise BadInput("feature_map", feature_map, f"one of {', '.join(get_args(FeatureMap))}")
        self.query_map = MAPS[feature_map](num_heads, self.head_dim)
        self.key_map = MAPS[feature_map](num_heads, self.head_dim)
        self.least = self.key_map.least
        self.recurrent, self.chunked = partial(recurrent, least=self.least), partial(chunked, least=self.least)

    def forward(self, x: Tensor, cache: State | None = None, mask: Tensor | None = None) -> Tensor:
        """As that of every `RecurrentMixer`, or without an order of tokens."""
        if self.causal:
            return super().forward(x, cache, mask)
        if cache is not None:
            raise BadInput("cache", type(cache).__name__, "None, but for causal attention")
        self._check_padding(x, mask)
        projected = self.qkv(x)
        (query, key, value), _ = self._heads(projected, None, None)
        with torch.autocast(x.device.type, enabled=False):
            mixed = unordered(*self.features(query, key), value, mask, self.least)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2).to(projected.dtype))
        return output

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> State:
        if not self.causal:
            raise BadInput("causal", False, "True: only causal attention has a cache")
        return super().new_cache(max_length, padding)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, H, T, T) of tokens (B, T, D), for a mask as `forward` takes it."""
        if self.causal:
            return super().weights(x, mask)
        self._check_padding(x, mask)
        (query, key, _), _ = self._heads(self.qkv(x), None, None)
        with torch.autocast(x.device.type, enabled=False):
            query, key = self.features(query, key)
            products = query @ key.mT if mask is None else query @ key.mT * mask[:, None, None]
            return normalise_weights(products, self.least)

    def _check_padding(self, x: Tensor, mask: Tensor | None) -> None:
        """Raise BadInput unless a mask says what is padding, of tokens without an order."""
        if x.is_nested:
            raise BadInput("x", "nested tensors", "texts of one length (B, T, D), with a mask of their padding")
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
            kind = f"{tuple(mask.shape)} {str(mask.dtype).removeprefix('torch.')}"
            raise BadInput("mask", kind, f"{tuple(x.shape[:2])} bool, false for padding, as it is not causal")

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_map(q), self.key_map(k)

    def state_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.query_map.width, self.head_dim + 1
