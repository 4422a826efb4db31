"""Multi-head self-attention (Vaswani et al. 2017) with a choice of torch's kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.kernels import Backend, check_backend, restrict_kernels, use_kernel


class SelfAttention(nn.Module):
    """Multi-head self-attention, softmax(q kᵀ / √(D / heads)) v, with queries, keys and values from one matrix.

    Dropout of attention weights happens inside torch's kernel and draws from torch's generator, so it is not keyed as
    the suite's other dropout is. Under `torch.compile` a refusal may be a compiler error that quotes torch's.

    Args:
        embed_dim: D, width of tokens.
        num_heads: heads, a divisor of D, each of width D / heads.
        causal: whether a token attends only to itself and earlier tokens.
        dropout: probability that a weight is zero, in training; below 1.
        bias: whether the projections have one.
        backend: the kernel; `auto` leaves the choice to torch, another is used or refused, never replaced.
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
            raise BadInput("num_heads", num_heads, f"a divisor of embed_dim, {embed_dim}")
        if not 0 <= dropout < 1:
            raise BadInput("dropout", dropout, "at least 0, less than 1")
        check_backend(backend)
        self.embed_dim, self.num_heads, self.causal = embed_dim, num_heads, causal
        self.dropout, self.backend = float(dropout), backend
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias)
        # If several ranks compute it: its rows are of three matrices, and the rows of a head stay together.
        self.qkv.joined = (3, num_heads)  # type: ignore[assignment]
        self.out = nn.Linear(embed_dim, embed_dim, bias)

    def forward(self, x: Tensor, cache: Cache | None = None, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D), which may be a jagged nested tensor: texts of unequal lengths.

        With a cache, x holds the tokens after the cached ones, and attends to these too. A mask (B, 1, T, T) bool says
        which keys each query attends to, in place of `causal`.

        Raises:
            BadInput: the backend has no kernel for this input, with torch's reasons; the cache is full, or passed to
                attention that is not causal, with jagged texts or gradients; a nested tensor is strided.
        """
        if x.is_nested and x.layout != torch.jagged:
            raise BadInput("", "nested tensors", "torch.nested.nested_tensor(texts, layout=torch.jagged)")
        query, key, value = self._heads(x)
        causal = self.causal and mask is None
        if cache is not None:
            if not self.causal or x.is_nested:
                raise BadInput("cache", "a Cache", "None, but for causal attention over texts of one length (B, T, D)")
            past = cache.length
            key, value = cache.append(key, value)
            mask = cache.mask(x.shape[1], x.device)
            causal = mask is None and not past  # torch's `is_causal` would count from the first token
        output: Tensor = self.out(self._attend(query, key, value, mask, causal).transpose(1, 2).flatten(-2))
        return output

    def _heads(self, x: Tensor) -> list[Tensor]:
        """Project tokens (B, T, D) to queries, keys and values (B, heads, T, D / heads) of all heads or this rank's."""
        width = self.embed_dim // self.num_heads
        parts = self.qkv(x).chunk(3, -1)
        if x.is_nested and not (x.is_cuda and x.dtype != torch.float64 and self.backend != "math"):
            parts = [part.contiguous() for part in parts]  # for jagged texts torch's math kernel takes nothing else
        return [part.unflatten(-1, (-1, width)).transpose(1, 2) for part in parts]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        call = (query, key, value, mask, self.dropout if self.training else 0.0, causal)
        if self.backend == "auto" and not query.is_nested:
            return F.scaled_dot_product_attention(*call)
        with (
            restrict_kernels(self.backend, query) if torch.compiler.is_compiling() else use_kernel(self.backend, *call)
        ):
            return F.scaled_dot_product_attention(*call)

    @staticmethod
    def parallel_layers() -> dict[str, ParallelStyle]:
        """How ranks share the heads, by the paths of layers."""
        return {"qkv": ColwiseParallel(), "out": RowwiseParallel()}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, causal={self.causal}, dropout={self.dropout}, backend={self.backend}"


@contextmanager
def any_kernel(module: nn.Module) -> Iterator[None]:
    """Inside, attention in this module may use any kernel, to learn shapes on another device than that of training."""
    backends = {m: m.backend for m in module.modules() if isinstance(m, SelfAttention)}
    for attention in backends:
        attention.backend = "auto"
    try:
        yield
    finally:
        for attention, backend in backends.items():
            attention.backend = backend
