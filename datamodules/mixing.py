"""Mixup and CutMix of the images of a batch, by draws for the seed and the step."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apprentice import keyed
from apprentice.batch import Batch, Mixed, Partners
from apprentice.errors import BadInput


@dataclass(frozen=True)
class Mixing:
    """Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019), as in torchvision; with both, half of the steps get each.

    The image of row r of a global batch is mixed with that of row r - 1, augmented as in that row, so batches are the
    same on any number of devices. One share, and one box, is drawn for a step: mixup's share, or that of CutMix's box
    in the image before the box is clipped, from Beta(alpha, alpha), alpha the value of each; 0 for none.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name, alpha in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if not 0 <= alpha < float("inf"):
                raise BadInput(f"data.{name}", alpha, "a number of 0 or more")

    def __bool__(self) -> bool:
        return bool(self.mixup or self.cutmix)

    def __call__(self, batch: Batch, seed: int) -> Batch:
        """Mix a batch of floats (b, C, H, W) with its `Partners`; `mixed` of the result has the second labels."""
        assert isinstance(batch.mixed, Partners)
        first, second, labels = batch.inputs, batch.mixed.inputs, batch.mixed.labels
        draw = np.random.default_rng(keyed.fold_in(seed, batch.step, 1))
        both = self.mixup and self.cutmix
        if draw.random() < 0.5 if both else self.mixup:
            share = draw.beta(self.mixup, self.mixup)
            inputs = first * share + second * (1 - share)
        else:
            inputs, share = _paste(first, second, draw.beta(self.cutmix, self.cutmix), draw)
        shares = torch.full((len(labels),), share, dtype=first.dtype, device=first.device)
        return batch._replace(inputs=inputs, mixed=Mixed(labels, shares))


def _paste(first: Tensor, second: Tensor, share: float, draw: np.random.Generator) -> tuple[Tensor, float]:
    """Paste a box of about 1 - `share` of the area from the second images; return also the share of the first left."""
    height, width = first.shape[-2:]
    column, row, half = int(draw.integers(width)), int(draw.integers(height)), 0.5 * (1 - share) ** 0.5
    top, bottom = max(row - int(half * height), 0), min(row + int(half * height), height)
    left, right = max(column - int(half * width), 0), min(column + int(half * width), width)
    inputs = first.clone()
    inputs[..., top:bottom, left:right] = second[..., top:bottom, left:right]
    return inputs, 1 - (bottom - top) * (right - left) / (height * width)
