"""Cross-attention: queries of one sequence, keys and values of another, the memory."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from apprentice.contract import Joined
from apprentice.errors import BadInput
from apprentice.keyed import Dropout
from lit_modules.nets.attention.attend import DropsWeights, attend, attention_weights
from lit_modules.nets.attention.form import Backend, Form
from lit_modules.nets.attention.heads import check_heads, of_rank
from lit_modules.nets.attention.masks import check_mask, narrow
from lit_modules.nets.attention.rms_norm import RMSNorm


class Memory(NamedTuple):
    """What one layer of cross-attention keeps of a memory of M tokens: it is computed once for all queries."""

    keys: Tensor  # (B, K, M, d)
    values: Tensor  # (B, K, M, d)
    present: Tensor | None  # (B, M) bool, false for padding; None if there is none


class CrossAttention(DropsWeights):
    """Multi-head cross-attention (Vaswani et al. 2017): softmax(s q kᵀ) v, k and v from the memory; not causal.

    Args:
        embed_dim: D, width of tokens that ask.
        num_heads: H, heads of queries; a divisor of D, unless `head_dim` is given.
        memory_dim: width of the memory's tokens; None for D.
        dropout: probability that a weight is zero, in training; below 1. As that of `SelfAttention`.
        bias: whether the projections have one.
        backend: the kernel, see `SelfAttention`.
        num_kv_heads: K, heads of keys and values, a divisor of H; None for H.
        qk_norm: whether an `RMSNorm` of each head's queries and keys comes first.
        softcap: c of scores c · tanh(score / c).
        head_dim: d, width of a head; None for D / H.
        scale: s of scores; None for 1 / √d.
        layer: number of its dropout among the dropout layers of a net.

    Raises:
        BadInput: a value can't be used, or two can't be combined.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        memory_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        backend: Backend = "auto",
        num_kv_heads: int | None = None,
        qk_norm: bool = False,
        softcap: float | None = None,
        head_dim: int | None = None,
        scale: float | None = None,
        layer: int = 0,
    ) -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.noise = Dropout(dropout, layer)
        self.memory_dim = embed_dim if memory_dim is None else memory_dim
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.form = Form(scale, softcap, backend)
        rows = self.num_kv_heads * self.head_dim
        self.query = nn.Linear(embed_dim, num_heads * self.head_dim, bias)
        self.kv = nn.Linear(self.memory_dim, 2 * rows, bias)
        cast("Joined", self.query).joined = (num_heads * self.head_dim,), self.num_kv_heads
        cast("Joined", self.kv).joined = (rows, rows), self.num_kv_heads
        self.q_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim) if qk_norm else None
        self.out = nn.Linear(num_heads * self.head_dim, embed_dim, bias)

    def remember(self, memory: Tensor, present: Tensor | None = None) -> Memory:
        """Return keys and values of a memory (B, M, memory_dim); `present` (B, M) bool is false for its padding."""
        if memory.shape[-1] != self.memory_dim:
            raise BadInput("memory", tuple(memory.shape), f"(B, M, {self.memory_dim})")
        if present is not None and (present.dtype != torch.bool or present.shape != memory.shape[:2]):
            raise BadInput("present", tuple(present.shape), f"bool {tuple(memory.shape[:2])}, false for padding")
        keys, values = (part.unflatten(-1, (-1, self.head_dim)) for part in self.kv(memory).chunk(2, -1))
        keys = keys if self.k_norm is None else self.k_norm(keys)
        return Memory(keys.transpose(1, 2), values.transpose(1, 2), present)

    def forward(self, x: Tensor, memory: Tensor | Memory, mask: Tensor | None = None) -> Tensor:
        """Return (B, T, D) of tokens (B, T, D) that ask a memory (B, M, memory_dim), or what `remember` kept of it.

        A mask says what a token sees beside the memory's own padding: boolean, true where it attends to a key, or
        floating point to be added to scores, (B, H, T, M) with any size 1, or boolean (B, M). A token that sees nothing
        gets 0 from its heads.

        Raises:
            BadInput: the memory is of another batch or width; the mask has another shape; the backend has no kernel.
        """
        memory = memory if isinstance(memory, Memory) else self.remember(memory)
        query, mask, empty = self._prepare(x, memory, mask)
        drop = self.drop(self.num_heads, self.query)
        mixed = attend(query, memory.keys, memory.values, self.form, mask, dropout=drop)
        mixed = mixed if empty is None else mixed.where(~empty, 0.0)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return output

    def weights(self, x: Tensor, memory: Tensor | Memory, mask: Tensor | None = None) -> Tensor:
        """Return the attention weights (B, H, T, M), without dropout; 0 where a token sees nothing."""
        memory = memory if isinstance(memory, Memory) else self.remember(memory)
        query, mask, empty = self._prepare(x, memory, mask)
        weights = attention_weights(query, memory.keys, self.form, mask)
        return weights if empty is None else weights.where(~empty, 0.0)

    def _prepare(self, x: Tensor, memory: Memory, mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return queries (B, H, T, d), the mask of both, and the queries that see nothing."""
        if len(x) != len(memory.keys):
            raise BadInput("memory", f"of {len(memory.keys)} texts", f"{len(x)}, as many as ask")
        query = self.query(x).unflatten(-1, (-1, self.head_dim))
        query = (query if self.q_norm is None else self.q_norm(query)).transpose(1, 2)
        if mask is not None:
            mask = check_mask(mask, x.shape[0], self.num_heads, x.shape[1], memory.keys.shape[2])
            mask = mask if mask.dtype == torch.bool else mask.to(query.dtype)
        if memory.present is not None:
            present = memory.present[:, None, None]
            if mask is None or mask.dtype == torch.bool:
                mask = present if mask is None else mask & present
            else:
                mask = mask.masked_fill(~present, -torch.inf)
        if mask is None:
            return query, None, None
        mask, empty = (of_rank(part, query.shape[1], self.query) for part in narrow(mask, causal=False))
        return query, mask, empty

    def parallel_layers(self) -> dict[str, ParallelStyle]:
        """How ranks share this module, by the paths of its layers: each computes some heads."""
        plan: dict[str, ParallelStyle] = {"query": ColwiseParallel(), "kv": ColwiseParallel()}
        if self.q_norm is not None:
            plan |= {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in ("q_norm", "k_norm")}
        return plan | {"out": RowwiseParallel()}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, backend={self.form.backend}"
