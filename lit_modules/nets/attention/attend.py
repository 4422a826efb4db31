"""Attention of queries, keys and values, by torch's kernels or written out."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.keyed import Dropout
from lit_modules.nets.attention.bands import cut_bands, join_bands, uses_bands
from lit_modules.nets.attention.flex import attend_flex
from lit_modules.nets.attention.form import Form
from lit_modules.nets.attention.heads import of_rank
from lit_modules.nets.attention.kernels import restrict_kernels, use_kernel
from lit_modules.nets.attention.masks import CausalMask

WRITTEN = {"auto", "math"}  # backends whose weights are written out where some are dropped
Drop: TypeAlias = Callable[[Tensor], Tensor] | float  # what drops weights, or the probability for a kernel to do so


def attend(
    query: Tensor, key: Tensor, value: Tensor, form: Form, mask: Tensor | CausalMask | None = None,
    causal: bool = False, dropout: Drop = 0.0,
) -> Tensor:  # fmt: skip
    """Return softmax(s q kᵀ) v (B, H, T, d) of queries (B, H, T, d), keys and values (B, K, n, d), K a divisor of H.

    Query head h uses key head h // (H / K). A mask broadcasts to (B, H, T, n), or is that of a whole text.

    Raises:
        BadInput: the backend has no kernel for this input, with torch's reasons.
    """
    if form.backend == "flex" and query.shape[0] and not callable(dropout):
        return attend_flex(query, key, value, mask, causal, dropout, form.scale, form.softcap)
    if isinstance(mask, CausalMask):
        if uses_bands(mask, query.shape[2]) and not callable(dropout):
            parts = cut_bands(query, key, value, mask)
            mixed = [attend(*part[:3], form, part[3], False, dropout) for part in parts]
            return join_bands(mixed, query.shape[0])
        mask = mask.tensor(query.shape[2], query.device)
    if callable(dropout) or form.softcap is not None:
        weights = attention_weights(query, key, form, mask, causal)
        return mix(dropout(weights) if callable(dropout) else weights, value)
    groups = query.shape[1] // key.shape[1] if key.shape[1] else 1
    if groups > 1 and query.shape[2] == 1 and not query.is_nested:
        # One query: those of a group as rows of one head read its keys once, in half of the time of `enable_gqa`.
        packed, mask = query.reshape(query.shape[0], -1, groups, query.shape[3]), _pack(mask, groups)
        return attend(packed, key, value, form, mask, False, dropout).reshape(*query.shape[:3], value.shape[3])
    if groups > 1 and query.is_cuda and (mask is not None or query.dtype in {torch.float32, torch.float64}):
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))  # else torch takes its math kernel
        groups = 1
    call = query, key, value, mask, dropout, causal
    options: dict[str, Any] = {"scale": form.scale, "enable_gqa": groups > 1}
    backend = "auto" if form.backend == "flex" else form.backend  # of an empty batch, for which flex has no grid
    if backend == "auto" and not query.is_nested:
        return F.scaled_dot_product_attention(*call, **options)
    kernel = (
        restrict_kernels(backend, query) if torch.compiler.is_compiling() else use_kernel(backend, *call, **options)
    )
    with kernel:
        return F.scaled_dot_product_attention(*call, **options)


def attention_weights(
    query: Tensor, key: Tensor, form: Form, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Return the weights (B, H, T, n) of `attend`, without dropout."""
    scale = query.shape[-1] ** -0.5 if form.scale is None else form.scale
    grouped = query.unflatten(1, (key.shape[1], -1))  # (B, K, H / K, T, d)
    scores = (scale * grouped @ key[:, :, None].mT).flatten(1, 2)  # (B, H, T, n)
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights: Tensor = scores.softmax(-1)
    return weights


def mix(weights: Tensor, value: Tensor) -> Tensor:
    """Return (B, H, T, d) of weights (B, H, T, n) and values (B, K, n, d)."""
    mixed: Tensor = weights.unflatten(1, (value.shape[1], -1)) @ value[:, :, None]
    return mixed.flatten(1, 2)


def _pack(mask: Tensor | None, groups: int) -> Tensor | None:
    """Return a mask for one query as one for its group's rows."""
    if mask is None or mask.dim() == 2 or mask.shape[1] == 1:
        return mask
    return mask.reshape(mask.shape[0], -1, groups, mask.shape[3])


class DropsWeights(nn.Module):
    """Attention whose weights may be dropped: keyed where they are written out, else as the kernel does by itself.

    Attributes:
        form: how scores are made, and the kernel.
        noise: the dropout of weights.
    """

    form: Form
    noise: Dropout

    @property
    def dropout(self) -> float:
        """The probability of a zero weight that a kernel draws from torch's generator; 0 where it is keyed."""
        return 0.0 if self.form.backend in WRITTEN else self.noise.p

    def drop(self, heads: int, layer: nn.Module) -> Drop:
        """Return what drops the weights of so many heads, of which ranks that share the layer have some each."""
        if not (self.noise.training and self.noise.p):
            return 0.0
        if self.form.backend not in WRITTEN:
            return self.noise.p

        def drop(weights: Tensor) -> Tensor:
            factors: Tensor = self.noise(weights.new_ones(weights.shape[0], heads, *weights.shape[2:]))
            return weights * of_rank(factors, weights.shape[1], layer)

        return drop
