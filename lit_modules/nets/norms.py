"""Norms of tokens."""

import torch
from torch import Tensor, nn

from lit_modules.nets.base import check_sizes


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang & Sennrich 2019, arXiv:1910.07467): x / √(mean of x² + eps) · w, over the last axis.

    The norm is computed in float32, or in float64 for such inputs. Llama rounds to the input's type before it
    multiplies by the weight; Gemma multiplies by (1 + w) first (`unit_offset`).

    Args:
        width: of the last axis.
        eps: added to the mean.
        unit_offset: whether to multiply by 1 + w, with w 0 at first, as Gemma does.
    """

    def __init__(self, width: int, eps: float = 1e-6, unit_offset: bool = False) -> None:
        super().__init__()
        check_sizes(width=width)
        self.eps, self.unit_offset = eps, unit_offset
        self.weight = nn.Parameter(torch.zeros(width) if unit_offset else torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.unit_offset:
            return (normed * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        scaled: Tensor = self.weight * normed.to(x.dtype)
        return scaled

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, unit_offset={self.unit_offset}"
