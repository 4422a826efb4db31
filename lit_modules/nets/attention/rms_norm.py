"""RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import math

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.attention.precision import widen


class RMSNorm(nn.Module):
    """x / √(mean x² + eps) times a weight, over the last dimension D; computed in float32 at least, as Llama's.

    Llama rounds to the input's type before it multiplies by the weight, Gemma after: in bfloat16 a third of the values
    differ.

    Args:
        width: D.
        eps: added to the mean of squares.
        unit_offset: multiply by 1 + weight, which starts at 0, and round after it (Gemma).
    """

    def __init__(self, width: int, eps: float = 1e-6, unit_offset: bool = False) -> None:
        super().__init__()
        check_eps(eps=eps)
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.zeros(width) if unit_offset else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (normed * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * normed.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}, unit_offset={self.unit_offset}"


def check_eps(**values: float) -> None:
    """Raise BadInput for an epsilon of a norm, by its name, that is not 0 or more."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise BadInput(name, value, "0 or more")
