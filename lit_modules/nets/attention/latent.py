"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from a small vector a token."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention.attend import DropsWeights, attend, attention_weights
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.cached_attention import CachedAttention
from lit_modules.nets.attention.form import Backend, Form
from lit_modules.nets.attention.heads import check_widths
from lit_modules.nets.attention.positions import Rotary
from lit_modules.nets.attention.rms_norm import RMSNorm


class LatentAttention(CachedAttention, DropsWeights):
    """Multi-head latent attention, with the rotary part of keys shared by all heads.

    c = norm(x W_a) of `kv_rank` numbers holds keys and values of all heads: k = [c W_k, rotated x W_r], v = c W_v,
    q = [q_nope, rotated q_rot], softmax(s q kᵀ) v. A cache holds c and the rotated x W_r alone. With a cache W_k and
    W_v are absorbed: s (q_nope W_k · c + q_rot · k_rot), and W_v after the mean of c.

    Pairs of rotated numbers are (m, m + d/2). DeepSeek's weights pair (2m, 2m + 1): reorder the rows of the rotary
    parts first. Ranks do not share the layer: each computes all of it.

    Args:
        embed_dim: D, width of tokens.
        num_heads: heads.
        causal: whether a token attends only to itself and earlier tokens.
        kv_rank: width of c; None for 4 `head_dim`.
        query_rank: width of a vector from which queries come, behind a norm; None for D, without one.
        head_dim: width of a head's part without rotation; None for D / heads.
        rotary_dim: width of a head's rotated part, even; None for half of `head_dim`, rounded up to an even number.
        value_dim: width of a head's values; None for `head_dim`.
        position: the rotation.
        dropout: probability that a weight is zero, in training; below 1. As that of `SelfAttention`.
        bias: whether the projections of x and the last one have one.
        backend: the kernel, see `SelfAttention`.
        scale: s of scores; None for 1 / √(head_dim + rotary_dim). DeepSeek multiplies this by the square of
            `yarn_magnitude(factor, mscale_all_dim)` where its rotation has these.
        layer: number of its dropout among the dropout layers of a net.

    Raises:
        BadInput: a value can't be used.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        causal: bool = False,
        kv_rank: int | None = None,
        query_rank: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int | None = None,
        value_dim: int | None = None,
        position: Rotary | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        backend: Backend = "auto",
        scale: float | None = None,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or (head_dim is None and embed_dim % num_heads):
            raise BadInput("num_heads", num_heads, f"a divisor of embed_dim, {embed_dim}")
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.noise = Dropout(dropout, layer)
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        self.rotary_dim = 2 * -(-self.head_dim // 4) if rotary_dim is None else rotary_dim
        self.kv_rank = 4 * self.head_dim if kv_rank is None else kv_rank
        check_widths(head_dim=self.head_dim, value_dim=self.value_dim, kv_rank=self.kv_rank)
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise BadInput("rotary_dim", self.rotary_dim, "an even number above 0")
        self.position, self.form = position or Rotary(), Form(scale, None, backend)
        rows = num_heads * (self.head_dim + self.rotary_dim)
        self.query_down = self.query_norm = None
        if query_rank is not None:
            check_widths(query_rank=query_rank)
            self.query_down, self.query_norm = nn.Linear(embed_dim, query_rank, bias), RMSNorm(query_rank)
        self.query = nn.Linear(query_rank or embed_dim, rows, bias and query_rank is None)
        self.latent = nn.Linear(embed_dim, self.kv_rank + self.rotary_dim, bias)
        self.latent_norm = RMSNorm(self.kv_rank)
        self.expand = nn.Linear(self.kv_rank, num_heads * (self.head_dim + self.value_dim), False)
        self.out = nn.Linear(num_heads * self.value_dim, embed_dim, bias)

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D); cache and mask are those of `SelfAttention`.

        Raises:
            BadInput: as `SelfAttention.forward`.
        """
        self.check_input(x, cache, mask)
        past = 0 if cache is None else cache.length
        query, latents = self._project(x, past)
        empty = None
        if cache is None:
            mask, empty = self.narrow_mask(x, mask, self.num_heads, query.dtype)
        else:
            latents, _ = cache.append(latents[:, None], latents[:, None, :, :0])  # one head, and no values beside it
            latents, mask = latents[:, 0], cache.mask(x.shape[1], x.device)
        attend_to = self._attend_absorbed if past else self._attend_expanded
        mixed = attend_to(query, latents, mask)
        mixed = mixed if empty is None else mixed.where(~empty, 0.0)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return output

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, H, T, T) of tokens (B, T, D), without dropout; 0 where one sees nothing."""
        query, latents = self._project(x, 0)
        mask, empty = self.narrow_mask(x, mask, self.num_heads, query.dtype)
        weights = attention_weights(query, self._expand(latents)[0], self.form, mask, self.causal and mask is None)
        return weights if empty is None else weights.where(~empty, 0.0)

    def cache_bytes(self, tokens: int, element_size: int) -> int:
        """Return the bytes that a text's cache takes after so many tokens."""
        return (self.kv_rank + self.rotary_dim) * tokens * element_size

    @staticmethod
    def parallel_layers() -> dict[str, ParallelStyle]:
        """Return no layers: the rotary part of keys belongs to all heads, so each rank computes them all."""
        return {}

    def _project(self, x: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """Return queries (B, H, T, head_dim + rotary_dim) and c with rotated keys (B, T, kv_rank + rotary_dim)."""
        asking = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
        query = self.query(asking).unflatten(-1, (self.num_heads, -1))
        plain, rotary = query.split([self.head_dim, self.rotary_dim], -1)
        c, key = self.latent(x).split([self.kv_rank, self.rotary_dim], -1)
        places = torch.arange(past, past + x.shape[1], device=x.device)
        rotary, key = self.position.rotate(places, rotary, key[:, :, None])
        latents = torch.cat([self.latent_norm(c), key[:, :, 0]], -1)
        return torch.cat([plain, rotary], -1).transpose(1, 2), latents

    def _expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, H, T, width) of c with rotated keys (B, T, kv_rank + rotary_dim)."""
        c, rotary = latents.split([self.kv_rank, self.rotary_dim], -1)
        expanded = self.expand(c).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        key, value = expanded.split([self.head_dim, self.value_dim], -1)
        return torch.cat([key, rotary[:, None].expand(*key.shape[:3], -1)], -1), value

    def _attend_expanded(self, query: Tensor, latents: Tensor, mask: Tensor | None) -> Tensor:
        key, value = self._expand(latents)
        wider = key.shape[-1] - self.value_dim  # kernels but the slowest take values as wide as keys
        value = F.pad(value, (0, wider)) if wider > 0 else value
        drop = self.drop(self.num_heads, self.query)
        mixed = attend(query, key, value, self.form, mask, self.causal and mask is None, drop)
        return mixed[..., : self.value_dim]

    def _attend_absorbed(self, query: Tensor, latents: Tensor, mask: Tensor | None) -> Tensor:
        weight = self.expand.weight.view(self.num_heads, self.head_dim + self.value_dim, self.kv_rank)
        to_key, to_value = weight.split([self.head_dim, self.value_dim], 1)  # (H, width, kv_rank)
        plain, rotary = query.split([self.head_dim, self.rotary_dim], -1)
        asking = torch.cat([plain @ to_key, rotary], -1)  # (B, H, T, kv_rank + rotary_dim)
        scale = (self.head_dim + self.rotary_dim) ** -0.5 if self.form.scale is None else self.form.scale
        one = latents[:, None]  # the one head of keys; values are c, and what is beside it is cut off
        drop = self.drop(self.num_heads, self.query)
        mixed = attend(asking, one, one, Form(scale, None, self.form.backend), mask, False, drop)
        absorbed: Tensor = mixed[..., : self.kv_rank] @ to_value.mT
        return absorbed

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, causal={self.causal}, position={self.position}"
