"""Which keys a query attends to."""

import torch
from torch import Tensor


def mask_texts(starts: Tensor) -> Tensor:
    """Return (B, 1, T, T) bool, true where a key is no later than a query and of the same text (see `Batch.starts`)."""
    places = torch.arange(starts.shape[1], device=starts.device)
    return ((starts[:, :, None] == starts[:, None]) & (places[:, None] >= places))[:, None]
