"""Multi-head self-attention (Vaswani et al. 2017) with torch's kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.nets.attention_kernels import Backend, check_backend, chosen, kernel


class Cache:
    """Keys and values of up to `max_length` tokens that one causal attention layer has seen, for generation.

    Use one for each layer and batch of texts. It starts empty and grows with each `SelfAttention.forward(x, cache)` by
    the tokens of x; `length` is their number, and the position of the next. It holds no gradients: generate under
    `torch.no_grad()`.

    Raises:
        ValueError: it is full, or gradients are on.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length, self.length = max_length, 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values (B, heads, t, D / heads); returns those of all tokens, (B, heads, length, D / heads)."""
        if keys.requires_grad:
            raise ValueError("a cache holds no gradients: expected a call under torch.no_grad()")
        end = self.length + keys.shape[2]
        if end > self.max_length:
            raise ValueError(f"max_length {self.max_length}: expected at least {end}, the tokens to be cached")
        if self._keys is None or self._values is None:
            shape = (*keys.shape[:2], self.max_length, keys.shape[3])
            self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class SelfAttention(nn.Module):
    """Multi-head self-attention, softmax(q kᵀ / √(D / heads)) v, with queries, keys and values from one matrix.

    Dropout of attention weights happens inside torch's kernel and draws from torch's generator, so unlike the suite's
    other dropout it is not keyed. Under `torch.compile` a refusal may be a compiler error that quotes torch's.

    Args:
        embed_dim: D, width of tokens.
        num_heads: heads, each of width D / heads.
        causal: whether a token attends only to itself and earlier tokens.
        dropout: probability that a weight is zero, in training.
        bias: whether the projections have one.
        backend: the kernel; `auto` leaves the choice to torch, any other is used or refused, never replaced.

    Raises:
        ValueError: `num_heads` does not divide `embed_dim`, `dropout` is not in [0, 1), or the backend is unknown.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        causal: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads {num_heads}: expected a divisor of embed_dim, {embed_dim}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout {dropout}: expected 0 <= dropout < 1")
        check_backend(backend)
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.dropout, self.backend = float(dropout), backend
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias)
        self.out = nn.Linear(embed_dim, embed_dim, bias)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        """(B, T, D) of tokens (B, T, D), which may be a jagged nested tensor: texts of unequal lengths, no padding.

        With a cache, x are the tokens after the cached ones, and attend to these too.

        Raises:
            BadInput: the backend has no kernel for this input; the message has torch's reasons.
            ValueError: a cache is full, or given for attention that is not causal, jagged texts or with gradients on.
        """
        query, key, value = self._heads(x)
        mask, causal = None, self.causal
        if cache is not None:
            if not self.causal or x.is_nested:
                raise ValueError("a cache serves causal attention over texts of one length (B, T, D)")
            past = cache.length
            key, value = cache.append(key, value)
            if past:  # query t attends to keys up to past + t; torch's `is_causal` would count from the first
                causal = False
                if x.shape[1] > 1:
                    mask = torch.ones(x.shape[1], cache.length, dtype=torch.bool, device=x.device).tril(past)
        return self.out(self._attended(query, key, value, mask, causal).transpose(1, 2).flatten(-2))

    def _heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values (B, heads, T, D / heads) of tokens (B, T, D)."""
        parts = self.qkv(x).chunk(3, -1)
        if x.is_nested and not (x.is_cuda and x.dtype != torch.float64 and self.backend != "math"):
            parts = [part.contiguous() for part in parts]  # for jagged texts torch's math kernel takes nothing else
        return [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts]

    def _attended(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        call = (query, key, value, mask, self.dropout if self.training else 0.0, causal)
        if self.backend == "auto" and not query.is_nested:
            return F.scaled_dot_product_attention(*call)
        with chosen(self.backend, query) if torch.compiler.is_compiling() else kernel(self.backend, *call):
            return F.scaled_dot_product_attention(*call)

    def extra_repr(self) -> str:  # noqa: D102
        return f"num_heads={self.num_heads}, causal={self.causal}, dropout={self.dropout}, backend={self.backend}"


@contextmanager
def any_kernel(module: nn.Module) -> Iterator[None]:
    """Inside, attention in this module uses any kernel: to learn shapes on another device than the training's."""
    backends = {m: m.backend for m in module.modules() if isinstance(m, SelfAttention)}
    for attention in backends:
        attention.backend = "auto"
    try:
        yield
    finally:
        for attention, backend in backends.items():
            attention.backend = backend
