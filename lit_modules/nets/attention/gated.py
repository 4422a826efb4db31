"""Gated linear attention (GLA, Yang et al. 2023, 2312.06635): a state that forgets, by channel and as tokens say."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.attention.chunks import Chunks, restart, scan
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.attention.recurrent import GatedNorm, RecurrentMixer


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token by token: S ← diag(e^g) S + k vᵀ; o = q S / √d.

    Args:
        q: (B, H, T, d), queries.
        k: (B, H, T, d), keys.
        v: (B, H, T, e), values.
        decay: (B, H, T, d), g, logarithms of what is kept; at most 0.
        state: (B, H, d, e), after the tokens before these; zeros if None.
        starts: (B, T) int64, where each token's text begins, below 0 for one that continues; None: all continue.

    Returns:
        (B, H, T, e) and the state after the last token.
    """
    state = _state(k, v, state)
    outputs = []
    tokens = zip(q.unbind(2), k.unbind(2), v.unbind(2), decay.unbind(2), strict=True)
    for place, (query, key, value, g) in enumerate(tokens):
        state = restart(state, starts, place) * g.exp()[..., None] + key[..., :, None] * value[..., None, :]
        outputs.append((query[..., None, :] @ state)[..., 0, :])
    return torch.stack(outputs, 2) / math.sqrt(q.shape[3]), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None = None, starts: Tensor | None = None,
    chunk: int = 16,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In chunks, with b the sum of g from the chunk's begin: o = (Q e^b) S + A V; S ← e^(b_C) S + (K e^(b_C - b))ᵀ V.

    A_ij = Σ_c q_ic k_jc e^(b_ic - b_jc) for j ≤ i, of differences: e^(-b) by itself overflows. It takes C · d numbers
    a token, so chunks are short. As `recurrent`, in time and memory linear in T.
    """
    chunks = Chunks(q.shape[2], chunk, starts, q.device)
    state = _state(k, v, state)
    q, k, v, b = chunks.cut(q / math.sqrt(q.shape[3])), chunks.cut(k), chunks.cut(v), chunks.cut(decay).cumsum(3)
    later = ~chunks.earlier[..., None]
    kept = (b[..., :, None, :] - b[..., None, :, :]).masked_fill(later, -math.inf).exp()  # (B, H, n, C, C, d)
    weights = (kept * k[..., None, :, :] @ q[..., None])[..., 0]  # (B, H, n, C, C)
    end = b[..., -1:, :]
    summands = chunks.writes(k * (end - b).exp()).mT @ v
    before, state = scan(chunks.passes(end.exp().mT), summands, state)
    return chunks.join(weights @ v + chunks.reads(q * b.exp()) @ before), state


def parallel(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """All tokens at once, T · d numbers a token held: one chunk."""
    return chunked(q, k, v, decay, state, starts, q.shape[2])


def _state(k: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    return v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if state is None else state


class GatedLinearAttention(RecurrentMixer):
    """Causal linear attention whose state (d, d) a head decays by g = logsigmoid(W₂ W₁ x + b) / 16, a channel each.

    The heads' outputs are normalised (RMSNorm), and gated by SiLU(W x) if `gate`.

    Args:
        embed_dim: D, width of tokens.
        num_heads: H, a divisor of D; heads have width d = D / H.
        conv: width of a causal convolution on q, k and v, see `ShortConvolution`; 0 for none.
        chunk: tokens of a chunk; the outputs don't depend on it.
        bias: whether the projections to q, k, v and out have one.
        gate: whether outputs are gated.
        rank: of W₂ W₁.
        temperature: what logsigmoid is divided by: the larger, the longer a state remembers.
        norm_eps: epsilon of the norm.
    """

    recurrent, chunked = staticmethod(recurrent), staticmethod(chunked)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        conv: int = 0,
        chunk: int = 16,
        bias: bool = True,
        gate: bool = True,
        rank: int = 16,
        temperature: float = 16.0,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(embed_dim, num_heads, conv, chunk, bias)
        if rank < 1:
            raise BadInput("rank", rank, "at least 1")
        self.temperature = temperature
        self.decay = nn.Sequential(nn.Linear(embed_dim, rank, bias=False), nn.Linear(rank, embed_dim))
        self.finish_heads = GatedNorm(embed_dim, self.head_dim, gate, norm_eps)

    def gates(self, x: Tensor) -> tuple[Tensor, ...]:
        decay = F.logsigmoid(widen(self.decay(x))) / self.temperature
        return (decay.unflatten(-1, (self.num_heads, -1)).transpose(1, 2),)

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        finished: Tensor = self.finish_heads(mixed, x)
        return finished
