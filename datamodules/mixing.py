"""Mixup and CutMix: each image of a batch with another one's pixels in it, by draws for the seed and the step."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apprentice import keyed
from apprentice.batch import Batch, Mixed, Partners
from apprentice.errors import BadInput


class Mixing(NamedTuple):
    """Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019), as in torchvision; of two, half of the steps get each.

    The second image of row r of a global batch is that of row r - 1, augmented as in its own row, so batches are the
    same on any number of devices. One share, and one box, is drawn for a step.

    Args:
        mixup: alpha of the share's distribution Beta(alpha, alpha); 0 for no mixup.
        cutmix: the same of CutMix, for the box's share of the image before it is clipped.

    Raises:
        BadInput: a number below 0, when `check` is called.
    """

    mixup: float = 0.0
    cutmix: float = 0.0

    def check(self) -> None:
        """Raise BadInput if an alpha can't be used."""
        for name, alpha in self._asdict().items():
            if not 0 <= alpha < float("inf"):
                raise BadInput(f"data.{name}", alpha, "a number of 0 or more")

    def __bool__(self) -> bool:
        return any(self)

    def __call__(self, batch: Batch, seed: int) -> Batch:
        """A batch with `Partners`, as floats (b, C, H, W), mixed with them; its `mixed` then has the second labels."""
        assert isinstance(batch.mixed, Partners)
        own, second, labels = batch.inputs, batch.mixed.inputs, batch.mixed.labels
        draw = np.random.default_rng(keyed.fold_in(seed, batch.step, 1))
        both = self.mixup and self.cutmix
        if draw.random() < 0.5 if both else self.mixup:
            share = draw.beta(self.mixup, self.mixup)
            inputs = own * share + second * (1 - share)
        else:
            inputs, share = _pasted(own, second, draw.beta(self.cutmix, self.cutmix), draw)
        shares = torch.full((len(labels),), share, dtype=own.dtype, device=own.device)
        return batch._replace(inputs=inputs, mixed=Mixed(labels, shares))


def _pasted(own: Tensor, second: Tensor, share: float, draw: np.random.Generator) -> tuple[Tensor, float]:
    """A box of about 1 - `share` of the area from the second images, and the share of the first that is left."""
    height, width = own.shape[-2:]
    column, row, half = int(draw.integers(width)), int(draw.integers(height)), 0.5 * (1 - share) ** 0.5
    top, bottom = max(row - int(half * height), 0), min(row + int(half * height), height)
    left, right = max(column - int(half * width), 0), min(column + int(half * width), width)
    inputs = own.clone()
    inputs[..., top:bottom, left:right] = second[..., top:bottom, left:right]
    return inputs, 1 - (bottom - top) * (right - left) / (height * width)
