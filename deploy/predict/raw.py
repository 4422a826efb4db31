"""Samples from files of the user's, prepared as those that a net has learnt from; unreadable ones are marked."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.image_sources import ImageFiles
from datamodules.splits import Split

READ, DAMAGED = 1, 0  # in place of a label


@dataclass(frozen=True)
class _InputFiles(ImageFiles):
    flag = "inputs"


class RawImages:
    """Images in files, as uint8 of one shape (C, H, W); one that can't be read is black, and DAMAGED.

    As in training they are turned upright by their EXIF tags, the shorter side is resized, and the centre cropped. For
    one channel they become grey.

    Args:
        root: the folder that names are relative to.
        names: paths of the images.
        shape: (C, H, W), C 1 or 3.
    """

    def __init__(self, root: Path, names: Sequence[str], shape: tuple[int, ...]) -> None:
        self.channels, *self.size = shape
        self.labels = torch.full((len(names),), READ)
        self._files = _InputFiles(self.labels, None, root, np.array([os.fsencode(name) for name in names]))

    def take(self, chosen: Tensor) -> Split:
        """Read the images at (k,) places, (k, C, H, W) uint8; labels say which of them could be read."""
        images = torch.zeros(len(chosen), self.channels, *self.size, dtype=torch.uint8)
        state = torch.full((len(chosen),), READ)
        for row, place in enumerate(chosen.tolist()):
            try:
                pixels = np.array(self.decode(place))
            except BadInput:
                state[row] = DAMAGED
            else:
                images[row] = torch.from_numpy(pixels.reshape(*self.size, self.channels)).permute(2, 0, 1)
        return Split(images, state)

    def decode(self, place: int) -> Image.Image:
        """Read one image; BadInput says why it can't be read."""
        colours = self._files.decode_upright(place)
        return fit(colours if self.channels == 3 else colours.convert("L"), *self.size)


def fit(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resize an image so that it just covers height and width, and crop the centre.

    Of a square this is torchvision's `resize` of the shorter side and `center_crop`, to the bit.
    """
    w, h = image.size
    if (w, h) == (width, height):
        return image
    size = (width, int(width * h / w)) if w * height <= h * width else (int(height * w / h), height)
    resized = image if size == image.size else image.resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - width) / 2.0), round((size[1] - height) / 2.0)
    return resized.crop((left, top, left + width, top + height))


def encode_texts(texts: Sequence[bytes], length: int) -> Split:
    """Return the first bytes of texts, then zeros, (n, length) uint8, all READ."""
    rows = b"".join(text[:length].ljust(length, b"\0") for text in texts)
    tokens = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, length)
    return Split(tokens, torch.full((len(texts),), READ))
