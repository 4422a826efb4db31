"""The delta rule (DeltaNet, Yang et al. 2024, 2406.06484), gated (Gated DeltaNet, 2412.06464) or not."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.nets.attention.chunks import Chunks, fold, restart
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.attention.recurrent import GatedNorm, RecurrentMixer


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor,
    state: Tensor | None = None, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Token by token: S ← e^g S; S ← S + k β (v - Sᵀ k)ᵀ, what is stored under k moves to v; o = Sᵀ q / √d.

    Args:
        q: (B, H, T, d), queries of length 1.
        k: (B, H, T, d), keys of length 1.
        v: (B, H, T, e), values.
        beta: (B, H, T), β, how far what is stored moves: 0 to 1.
        decay: (B, H, T), g, the logarithm of what is kept; at most 0.
        state: (B, H, d, e), after the tokens before these; zeros if None.
        starts: (B, T) int64, where each token's text begins, below 0 for one that continues; None: all continue.

    Returns:
        (B, H, T, e) and the state after the last token.
    """
    state = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if state is None else state
    outputs = []
    tokens = zip(q.unbind(2), k.unbind(2), v.unbind(2), beta.unbind(2), decay.unbind(2), strict=True)
    for place, (query, key, value, rate, g) in enumerate(tokens):
        state = restart(state, starts, place) * g.exp()[..., None, None]
        error = value - (key[..., None, :] @ state)[..., 0, :]
        state = state + key[..., :, None] * (rate[..., None] * error)[..., None, :]
        outputs.append((query[..., None, :] @ state)[..., 0, :])
    return torch.stack(outputs, 2) / math.sqrt(q.shape[3]), state


def chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor,
    state: Tensor | None = None, starts: Tensor | None = None, chunk: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """In chunks, with b the sum of g from the chunk's begin, D_ij = e^(b_i - b_j) for j ≤ i and 0 else.

    L = I + β (K Kᵀ ⊙ D) below the diagonal; U = L⁻¹ β V, W = L⁻¹ β K e^b; chunk by chunk N = U - W S,
    o = (Q e^b) S + (Q Kᵀ ⊙ D) N, S ← e^(b_C) S + (K e^(b_C - b))ᵀ N. As `recurrent`, in time and memory linear in T.
    """
    chunks = Chunks(q.shape[2], chunk, starts, q.device)
    state = v.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if state is None else state
    q, k, v = chunks.cut(q / math.sqrt(q.shape[3])), chunks.cut(k), chunks.cut(v)
    beta, b = chunks.cut(beta[..., None]), chunks.cut(decay[..., None]).cumsum(3)  # (B, H, n, C, 1)
    kept = (b - b.mT).masked_fill(~chunks.earlier, -math.inf).exp()  # D
    read = chunks.reads(b.exp())
    right = torch.cat([beta * v, beta * k * read], -1)
    lower = beta * (k @ k.mT) * kept  # its diagonal counts as 1
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    weights, queries, end = q @ k.mT * kept, q * read, b[..., -1:, :]
    keys, factors = chunks.writes(k * (end - b).exp()).mT, chunks.passes(end.exp())

    def step(state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        u, w, weights, queries, keys, factor = parts
        new = u - w @ state
        return queries @ state + weights @ new, factor * state + keys @ new

    outputs, state = fold(step, state, u, w, weights, queries, keys, factors)
    return chunks.join(outputs), state


def parallel(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor,
    state: Tensor | None = None, starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All tokens at once, two matrices (T, T) held and a system of T equations solved: one chunk."""
    return chunked(q, k, v, beta, decay, state, starts, q.shape[2])


class DeltaAttention(RecurrentMixer):
    """Causal linear attention that replaces what is stored under a key; its state is (d, d) a head.

    q and k are divided by their lengths, β = σ(W x), g = -e^A softplus(W x + c) with A and c a head each, or 0. The
    heads' outputs are normalised (RMSNorm), and gated by SiLU(W x) if `gate`. With its defaults and no bias it is the
    layer of Qwen3-Next.

    Args:
        embed_dim: D, width of tokens.
        num_heads: H, a divisor of D; heads have width d = D / H.
        gated: whether the state decays.
        conv: width of a causal convolution on q, k and v, see `ShortConvolution`; 0 for none.
        chunk: tokens of a chunk; the outputs don't depend on it.
        bias: whether the projections to q, k, v and out have one.
        gate: whether outputs are gated.
        norm_eps: epsilon of the norm.
    """

    recurrent, chunked = staticmethod(recurrent), staticmethod(chunked)

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        gated: bool = True,
        conv: int = 4,
        chunk: int = 64,
        bias: bool = True,
        gate: bool = True,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(embed_dim, num_heads, conv, chunk, bias)
        self.beta = nn.Linear(embed_dim, num_heads, bias=False)
        self.decay = _Decay(embed_dim, num_heads) if gated else None
        self.finish_heads = GatedNorm(embed_dim, self.head_dim, gate, norm_eps)

    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return _normalise(q), _normalise(k)

    def gates(self, x: Tensor) -> tuple[Tensor, ...]:
        beta = widen(self.beta(x)).sigmoid().transpose(1, 2)
        return beta, torch.zeros_like(beta) if self.decay is None else self.decay(x).transpose(1, 2)

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        finished: Tensor = self.finish_heads(mixed, x)
        return finished


class _Decay(nn.Module):
    """g = -e^A softplus(W x + c), (B, T, H) of tokens (B, T, D). At first e^A is 1 to 16, softplus(c) 0.001 to 0.1."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(embed_dim, num_heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())  # as in Mamba-2
        step = torch.empty(num_heads).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step

    def forward(self, x: Tensor) -> Tensor:
        # softplus(z) as -logsigmoid(-z): torch.compile takes softplus' gradient to be laid out otherwise than it is.
        step = -F.logsigmoid(-widen(self.project(x)) - widen(self.bias))
        return -widen(self.log_rate).exp() * step


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
