"""Image files on disk: listed once, decoded when they are taken."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.transforms import functional as transforms

from apprentice.errors import BadInput
from datamodules.splits import Split

UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
SILENCE = 5.0  # seconds of decoding without a line
LARGE = 128 * 128  # pixels from which two threads decode faster than one; at 32 x 32 they take twice as long

T = TypeVar("T")


class Damaged(BadInput):
    """An image that can't be read."""


class Files(NamedTuple):
    """Images below `root` with labels (n,), to be resized to `image_size`, or all of the size of the image `first`.

    `names` (n,) are paths as bytes, in one array: a list would take ten times as much, once more in each worker.
    """

    root: Path
    names: np.ndarray
    labels: Tensor
    image_size: int | None
    first: Path

    def path(self, place: int) -> Path:
        """Where an image is."""
        return self.root / os.fsdecode(self.names[place])

    def part(self, chosen: Tensor) -> "Files":
        """The files at these (k,) places."""
        return self._replace(names=self.names[chosen.numpy()], labels=self.labels[chosen])

    def take(self, chosen: Tensor) -> Split:
        """Decode the chosen ones to (k, 3, H, W) uint8; BadInput names one that can't be read, or of another size."""
        height, width = size = self.size()
        images = torch.empty(len(chosen), 3, height, width, dtype=torch.uint8)
        rows, places = images.numpy(), chosen.tolist()

        def decode(row: int) -> None:
            path = self.path(places[row])
            pixels = np.asarray(self.open(path))
            if pixels.shape[:2] != size:
                found = f"{path} is {pixels.shape[1]}x{pixels.shape[0]} and {self.first} is {width}x{height}"
                raise BadInput("data.image_size", self.image_size, f"a size to bring all images to, as {found}")
            rows[row] = pixels.transpose(2, 0, 1)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            each = (map if get_worker_info() or not self._large() else pool.map)(decode, range(len(places)))
            deque(told(each, len(places)), maxlen=0)
        return Split(images, self.labels[chosen])

    def open(self, path: Path) -> Image.Image:
        """One image, decoded, upright and in RGB; with an image size, short side resized and centre cropped."""
        with readable(path) as image:
            upright, form = ImageOps.exif_transpose(image), image.format
        colours = in_rgb(upright, form, path)
        if self.image_size is None or colours.size == (self.image_size, self.image_size):
            return colours
        return transforms.center_crop(transforms.resize(colours, self.image_size), [self.image_size])

    def size(self) -> tuple[int, int]:
        """(H, W) of the images when taken."""
        if self.image_size is not None:
            return self.image_size, self.image_size
        with readable(self.first) as image:
            upright = ImageOps.exif_transpose(image)
        return upright.height, upright.width

    def _large(self) -> bool:
        with readable(self.first) as image:
            return image.width * image.height > LARGE


def told(decoded: Iterable[T], total: int, step: int = 1) -> Iterator[T]:
    """Pass on what decodes `step` images each, with a line now and then on how far it is."""
    said = time.monotonic()
    for done, found in enumerate(decoded, 1):
        if time.monotonic() - said > SILENCE:
            said = time.monotonic()
            rank_zero_only(print)(f"ImageFolder: decoded {done * step:,} of {total:,} images", flush=True)
        yield found


@contextmanager
def readable(path: Path) -> Iterator[Image.Image]:
    """An open image whose pixels are read on demand; Damaged names the file if they can't be."""
    try:
        with Image.open(path) as image:
            yield image
    except UNREADABLE as error:
        raise Damaged("data.root", path, f"an image that can be read ({error})") from error


def in_rgb(image: Image.Image, form: str | None, path: Path) -> Image.Image:
    """The image in RGB; scales 16 bits of grey, and floats from 0 to 1, to 8 bits, where PIL would clip."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image.convert("RGB")
    values, white = np.asarray(image, np.float64), 1 if image.mode == "F" else 2**16 - 1
    unknown = image.mode == "I" and form not in {"PNG", "PPM"}  # PIL gives a PGM's greys as integers up to 65535
    if unknown or not 0 <= values.min() <= values.max() <= white:
        found = f"this one has {values.min():g} to {values.max():g}" + " in 32 bits" * unknown
        raise BadInput("data.root", path, f"an image of 8 or 16 bits a channel, or floats from 0 to 1; {found}")
    return Image.fromarray((values * 255 / white).round().astype(np.uint8)).convert("RGB")
