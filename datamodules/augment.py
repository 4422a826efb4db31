"""Random crop and flip as a function of key and sample: independent of batch, rank and device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice import keyed


def crop_padding(height: int, width: int) -> int:
    """Pixels of padding for the random crop: 4, as usual at 32 x 32, and proportionally fewer for smaller images."""
    return min(4, min(height, width) // 8)


def augment(images: Tensor, key: int, index: Tensor, flip: bool) -> Tensor:
    """Shift each image (B, C, H, W) randomly over a border of 0, black before normalising; `flip` mirrors half of them.

    A sample's draw depends on `key` and on its place in the data set, `index` (B,), alone. Returns a new tensor.
    """
    b, _, h, w = images.shape
    pad = crop_padding(h, w)
    drawn = keyed.bits(key, index, columns=3)  # (B, 3) in [0, 2**32)
    top, left = ((drawn[:, :2] * (2 * pad + 1)) >> 32).unbind(1)  # (B,) each, in [0, 2 * pad]
    windows = F.pad(images, (pad, pad, pad, pad)).unfold(2, h, 1).unfold(3, w, 1)  # (B, C, 2 pad + 1, 2 pad + 1, H, W)
    crops = windows[torch.arange(b, device=images.device), :, top, left]
    return torch.where((drawn[:, 2] >= 2**31)[:, None, None, None], crops.flip(3), crops) if flip else crops
