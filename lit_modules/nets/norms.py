"""Norms of tokens: layer norm, and RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from typing import Literal

from torch import nn

from apprentice.errors import BadInput
from lit_modules.nets.attention.rms_norm import RMSNorm, check_eps

__all__ = ["RMSNorm", "TokenNorm", "token_norm"]

TokenNorm = Literal["layer", "rms"]


def token_norm(kind: TokenNorm, width: int, eps: float, bias: bool = True, unit_offset: bool = False) -> nn.Module:
    """Return a norm of tokens (..., width); `bias` is that of a layer norm, `unit_offset` that of an RMS norm.

    Raises:
        BadInput: an unknown kind, an epsilon below 0, or an offset for a layer norm.
    """
    check_eps(norm_eps=eps)
    if kind == "rms":
        return RMSNorm(width, eps, unit_offset)
    if kind != "layer":
        raise BadInput("norm", kind, "layer or rms")
    if unit_offset:
        raise BadInput("unit_offset", True, "false with norm=layer: only RMS norms have it")
    return nn.LayerNorm(width, eps, bias=bias)
