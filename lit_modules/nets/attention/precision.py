"""The types in which sums and roots are computed."""

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """Cast 16-bit types to float32."""
    return x.float() if x.dtype in {torch.float16, torch.bfloat16} else x
