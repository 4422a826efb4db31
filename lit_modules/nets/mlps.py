"""The MLPs of transformer blocks: GELU, gated, and a mixture of experts."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.keyed import Jitter
from lit_modules.nets.attention.precision import widen

TokenMLP = Literal["gelu", "gelu_tanh", "swiglu", "geglu", "moe"]
WIDE = 1024  # from here on the hidden width of a gated MLP is a multiple of 256, as Llama's; below, of 8


class GeluMLP(nn.Sequential):
    """W₂ gelu(W₁ x), tokens (..., D) to (..., D).

    Args:
        width: D.
        hidden: rows of W₁.
        bias: whether both have one.
        tanh: approximate GELU by tanh, as GPT-2 does.
    """

    def __init__(self, width: int, hidden: int, bias: bool = True, tanh: bool = False) -> None:
        gelu = nn.GELU("tanh" if tanh else "none")
        super().__init__(nn.Linear(width, hidden, bias), gelu, nn.Linear(hidden, width, bias))

    @staticmethod
    def parallel_layers() -> dict[str, ParallelStyle]:
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) ⊙ W_up x), tokens (..., D) to (..., D) (Shazeer 2020, arXiv:2002.05202; Llama).

    Args:
        width: D.
        hidden: rows of W_gate and W_up; default: `gated_width(D)`.
        bias: whether all three have one.
        gelu: the gate is GELU, approximated by tanh, in place of silu (Gemma).
    """

    def __init__(self, width: int, hidden: int | None = None, bias: bool = False, gelu: bool = False) -> None:
        super().__init__()
        hidden = gated_width(width) if hidden is None else hidden
        self.gelu = gelu
        self.gate = nn.Linear(width, hidden, bias)
        self.up = nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        output: Tensor = self.down(gate * self.up(x))
        return output

    @staticmethod
    def parallel_layers() -> dict[str, ParallelStyle]:
        return {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


class MixtureOfExperts(nn.Module):
    """Each token goes through the `top_k` of the SwiGLU experts that its router prefers (Mixtral, arXiv:2401.04088).

    No token is dropped. What balances the experts' loads is a loss of the router's outputs (B, T, experts), the logits
    before the softmax: see `lit_modules.training.expert_balance`. With tensor parallelism each rank computes all
    experts. Compiled, and on the meta device, all experts compute all tokens, whose weights are 0 where they were not
    chosen: equal up to rounding, experts / top_k times the operations.

    Args:
        width: D.
        hidden: of each expert; default: `gated_width(D)`.
        experts: their number.
        top_k: experts of a token.
        renormalise: divide the weights of the chosen experts by their sum (Mixtral); otherwise they are probabilities
            of all (Qwen3-MoE's norm_topk_prob=False).
        noise: in training the router's inputs are multiplied by uniform numbers of [1 - noise, 1 + noise] (Switch,
            arXiv:2101.03961), keyed to the rows of the global batch.
        layer: number of the layer among those of a net with such noise.
        balance: weight of the loss of `lit_modules.training.expert_balance` in this suite's modules (Switch: 0.01).

    Raises:
        BadInput: a size below 1, `top_k` not from 1 to `experts`, or the noise not in [0, 1).
    """

    brings_extra = "lit_modules.training.expert_balance.ExpertBalance"

    def __init__(
        self,
        width: int,
        hidden: int | None = None,
        experts: int = 8,
        top_k: int = 2,
        renormalise: bool = True,
        noise: float = 0.0,
        layer: int = 0,
        balance: float = 0.01,
    ) -> None:
        super().__init__()
        if not balance >= 0:
            raise BadInput("balance", balance, "at least 0")
        if experts < 1:
            raise BadInput("experts", experts, "at least 1")
        if not 1 <= top_k <= experts:
            raise BadInput("top_k", top_k, f"1 to {experts}, the experts")
        if hidden is not None and hidden < 1:
            raise BadInput("hidden", hidden, "at least 1")
        hidden = gated_width(width) if hidden is None else hidden
        self.experts, self.top_k, self.renormalise, self.balance = experts, top_k, renormalise, balance
        self.jitter = Jitter(noise, layer)
        self.router = nn.Linear(width, experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(experts, hidden, width)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        for weight in (self.gate, self.up, self.down):
            nn.init.uniform_(weight, -1 / math.sqrt(weight.shape[2]), 1 / math.sqrt(weight.shape[2]))  # nn.Linear's

    def forward(self, x: Tensor) -> Tensor:
        probabilities = softmax(self.router(self.jitter(x))).flatten(0, -2)  # (N, experts)
        weights, choices = probabilities.topk(self.top_k)  # (N, top_k)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        compute = self._compute_all if torch.compiler.is_compiling() or x.is_meta else self._compute_chosen
        return compute(x.flatten(0, -2), weights.to(x.dtype), choices).view_as(x)

    def _compute_chosen(self, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
        """Return (N, D), the weighted sum of the chosen experts' outputs for tokens x (N, D)."""
        output = torch.zeros_like(x)
        for number in range(self.experts):
            rows, places = (choices == number).nonzero(as_tuple=True)
            chosen = x[rows]
            hidden = F.silu(F.linear(chosen, self.gate[number])) * F.linear(chosen, self.up[number])
            result = F.linear(hidden, self.down[number]) * weights[rows, places, None]
            output = output.index_add(0, rows, result.to(output.dtype))
        return output

    def _compute_all(self, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
        shares = x.new_zeros(x.shape[0], self.experts).scatter(1, choices, weights)
        hidden = F.silu(torch.einsum("nd,ehd->neh", x, self.gate)) * torch.einsum("nd,ehd->neh", x, self.up)
        return torch.einsum("neh,edh,ne->nd", hidden, self.down, shares)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, top_k={self.top_k}, renormalise={self.renormalise}"


def softmax(logits: Tensor) -> Tensor:
    """Return probabilities in float32 at least."""
    return widen(logits).softmax(-1)


def gated_width(width: int, multiplier: float = 1.0) -> int:
    """Return the hidden width of a gated MLP with the parameters of one of 4 D without a gate: 8 D / 3, rounded up.

    Llama's rule, 4096 to 11008 (Llama 3 with a multiplier of 1.3 and multiples of 1,024); see WIDE for narrow nets.
    """
    multiple = 256 if width >= WIDE else 8
    return multiple * math.ceil(int(multiplier * int(8 * width / 3)) / multiple)


def token_mlp(kind: TokenMLP, width: int, hidden: int | None, bias: bool, ratio: int = 4) -> nn.Module:
    """Return an MLP of tokens (..., width), but for "moe"; `hidden` None means the width that is usual for its kind.

    Raises:
        BadInput: an unknown kind, or a hidden width below 1.
    """
    if hidden is not None and hidden < 1:
        raise BadInput("hidden", hidden, "at least 1")
    if kind in {"gelu", "gelu_tanh"}:
        return GeluMLP(width, ratio * width if hidden is None else hidden, bias, kind == "gelu_tanh")
    if kind in {"swiglu", "geglu"}:
        return SwiGLU(width, hidden, bias, kind == "geglu")
    raise BadInput("mlp", kind, "gelu, gelu_tanh, swiglu, geglu or moe")
