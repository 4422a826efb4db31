"""Differential attention (Ye et al. 2024, arXiv:2410.05258): the difference of two softmaxes."""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from apprentice.contract import Joined
from apprentice.errors import BadInput
from lit_modules.nets.attention.attend import attend, attention_weights
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.cached_attention import CachedAttention
from lit_modules.nets.attention.form import Backend, Form
from lit_modules.nets.attention.heads import check_heads
from lit_modules.nets.attention.positions import Rotary
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.attention.rms_norm import check_eps

DEVIATION = 0.1  # of the first numbers that make λ


class DifferentialAttention(CachedAttention):
    """Differential attention: norm((softmax(s q₁ k₁ᵀ) - λ softmax(s q₂ k₂ᵀ)) v) (1 - λ₀), in the layout of diffllama.

    Heads i and i + H/2 of H are a pair, whose values are 2 d wide. λ = e^(a₁·b₁) - e^(a₂·b₂) + λ₀ is learnt, and
    λ₀ = 0.8 - 0.6 e^(-0.3 layer). The norm is over 2 d, without a weight. There is no dropout of weights: the paper
    has none.

    Args:
        embed_dim: D, width of tokens.
        num_heads: H, heads of queries, even: two of softmax for each of output; a divisor of D, unless `head_dim` is
            given.
        causal: whether a token attends only to itself and earlier tokens.
        bias: whether the projections have one.
        backend: the kernel, see `SelfAttention`.
        num_kv_heads: K, heads of keys and values, an even divisor of H; None for H.
        position: the rotation; None for none.
        head_dim: d, width of a head; None for D / H.
        scale: s of scores; None for 1 / √d.
        layer: number of the block, from 0.
        eps: of the norm.

    Raises:
        BadInput: a value can't be used.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        causal: bool = False,
        bias: bool = True,
        backend: Backend = "auto",
        num_kv_heads: int | None = None,
        position: Rotary | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        layer: int = 0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        for name, heads in (("num_heads", num_heads), ("num_kv_heads", self.num_kv_heads)):
            if heads % 2:
                raise BadInput(name, heads, "an even number: heads of differential attention are pairs")
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if position is not None and self.head_dim % 2:
            raise BadInput("position", "Rotary", f"heads of an even width; theirs is {self.head_dim}")
        check_eps(eps=eps)
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.position, self.form = position, Form(scale, None, backend)
        query, key = (heads // 2 * self.head_dim for heads in (num_heads, self.num_kv_heads))
        self.qkv = nn.Linear(embed_dim, 2 * query + 4 * key, bias)
        # If several ranks compute it, each has pairs: some of the first heads, and the same of the second ones.
        cast("Joined", self.qkv).joined = (query, query, key, key, key, key), self.num_kv_heads // 2
        self.difference = _Difference(self.head_dim, layer, eps)
        self.out = nn.Linear(num_heads * self.head_dim, embed_dim, bias)

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D); cache and mask are those of `SelfAttention`, a mask for all heads.

        Raises:
            BadInput: as `SelfAttention.forward`.
        """
        self.check_input(x, cache, mask)
        past, empty = 0 if cache is None else cache.length, None
        query, key, value = self._heads(x, past)
        if cache is None:
            mask, empty = self.narrow_mask(x, mask, 1, query.dtype)
        else:
            key, value = cache.append(key, value)
            mask = cache.mask(x.shape[1], x.device)
        causal = self.causal and mask is None and not past
        # Kernels take values as wide as keys, so each half of a pair's values is mixed by itself.
        halves = [attend(query, key, half.repeat(1, 2, 1, 1), self.form, mask, causal) for half in value.chunk(2, 1)]
        mixed = torch.cat(halves, -1)  # (B, H, T, 2 d)
        mixed = mixed if empty is None else mixed.where(~empty, 0.0)
        pairs = mixed.unflatten(1, (2, -1)).permute(0, 3, 2, 1, 4)  # (B, T, H / 2, 2, 2 d)
        output: Tensor = self.out(self.difference(pairs).flatten(-2))
        return output

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the signed weights (B, H / 2, T, T) of each pair, softmax₁ - λ softmax₂; 0 where one sees nothing."""
        query, key, _ = self._heads(x, 0)
        mask, empty = self.narrow_mask(x, mask, 1, query.dtype)
        first, second = attention_weights(query, key, self.form, mask, self.causal and mask is None).chunk(2, 1)
        weights: Tensor = first - self.difference.factor() * second
        return weights if empty is None else weights.where(~empty, 0.0)

    def cache_bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes that a text's cache takes after so many tokens."""
        return 2 * self.num_kv_heads * self.head_dim * tokens * element_size

    @staticmethod
    def parallel_layers() -> dict[str, ParallelStyle]:
        """How ranks share this module, by the paths of its layers: each computes some pairs of heads."""
        difference = SequenceParallel(sequence_dim=2, use_local_output=True)
        return {"qkv": ColwiseParallel(), "difference": difference, "out": RowwiseParallel()}

    def _heads(self, x: Tensor, past: int) -> list[Tensor]:
        """Return queries (B, H, T, d), keys and values (B, K, T, d) of all heads or this rank's."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        keys = heads.shape[2] // (self.num_heads // self.num_kv_heads + 2)
        query, key, value = heads.split([heads.shape[2] - 2 * keys, keys, keys], 2)
        if self.position is not None:
            places = torch.arange(past, past + x.shape[1], device=x.device)
            query, key = self.position.rotate(places, query, key)
        return [part.transpose(1, 2) for part in (query, key, value)]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, causal={self.causal}"


class _Difference(nn.Module):
    """Pairs (B, T, H / 2, 2, 2 d) to norm(first - λ second) (1 - λ₀), (B, T, H / 2, 2 d)."""

    def __init__(self, head_dim: int, layer: int, eps: float) -> None:
        super().__init__()
        self.first_factor, self.eps = 0.8 - 0.6 * math.exp(-0.3 * layer), eps
        self.q1, self.k1, self.q2, self.k2 = (
            nn.Parameter(nn.init.normal_(torch.empty(head_dim), std=DEVIATION)) for _ in range(4)
        )

    def factor(self) -> Tensor:
        """Return λ."""
        return (self.q1 * self.k1).sum().exp() - (self.q2 * self.k2).sum().exp() + self.first_factor

    def forward(self, pairs: Tensor) -> Tensor:
        first, second = pairs.unbind(3)
        x = first - self.factor() * second
        wide = widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * (1 - self.first_factor)
