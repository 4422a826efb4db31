"""Images that are decoded when they are taken: files on disk, or what else holds them."""

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.transforms import functional as transforms

from apprentice.errors import BadInput, reason
from datamodules.splits import Split

TURNS = {  # that bring an image upright, by its EXIF orientation
    2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # fmt: skip
SILENCE = 5.0  # seconds of decoding without a line
THREADS = 16  # that ask a disk for the sizes of files
LARGE = 128 * 128  # pixels from which two threads decode faster than one; at 32 x 32 they take twice as long
T = TypeVar("T")


class DamagedImage(BadInput):
    """An image that can't be read."""


@dataclass(frozen=True)
class ImageSource:
    """Images with labels (n,), to be resized to `image_size`, or all of one size."""

    flag: ClassVar[str]  # the option that says where they are
    labels: Tensor
    image_size: int | None
    first: str = field(default="", kw_only=True)  # the name of an image
    size: tuple[int, int] = field(default=(0, 0), kw_only=True)  # its (H, W) when taken, and so of all

    def name(self, place: int) -> str:
        """Of an image, for messages."""
        raise NotImplementedError

    def short_name(self, place: int) -> str:
        """Of an image, for lists: the same wherever the set lies."""
        return self.name(place)

    def open_image(self, place: int) -> AbstractContextManager[Image.Image]:
        """An image whose pixels are read on demand, in the block; DamagedImage names it if they can't be."""
        raise NotImplementedError

    def cache_key(self) -> Iterator[bytes]:
        """What determines the pixels of the images, by which near duplicates are kept for later runs."""
        raise NotImplementedError

    def all_names(self) -> bytes:
        """Of all images, for a fingerprint: the same wherever the set lies."""
        raise NotImplementedError

    def sizes_and_times(self) -> np.ndarray:
        """(n, 2) int64, of each image as it is stored the bytes, and its file's time in ns, or 0."""
        raise NotImplementedError

    def content(self, place: int) -> bytes:
        """An image as it is stored."""
        raise NotImplementedError

    def part(self, chosen: Tensor) -> Any:
        """The images at these (k,) places."""
        return replace(self, labels=self.labels[chosen])

    def first_size(self) -> tuple[int, int]:
        """(H, W) of the first image when taken."""
        if self.image_size is not None:
            return self.image_size, self.image_size
        with self.open_image(0) as image:
            turned = turn_upright(image)
        return turned.height, turned.width

    def take(self, chosen: Tensor) -> Split:
        """Decode the chosen ones to (k, 3, H, W) uint8; BadInput names one that can't be read, or of another size."""
        height, width = self.size
        images = torch.empty(len(chosen), 3, height, width, dtype=torch.uint8)
        rows, places = images.numpy(), chosen.tolist()

        def decode_row(row: int) -> None:
            pixels = np.asarray(self.decode(places[row]))
            if pixels.shape[:2] != self.size:
                name = self.name(places[row])
                sizes = f"{name} is {pixels.shape[1]}x{pixels.shape[0]} and {self.first} is {width}x{height}"
                raise BadInput("data.image_size", self.image_size, f"a size to bring all images to, as {sizes}")
            rows[row] = pixels.transpose(2, 0, 1)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            several = places and not get_worker_info() and self._large(places[0])
            deque(with_progress((pool.map if several else map)(decode_row, range(len(places))), len(places)), maxlen=0)
        return Split(images, self.labels[chosen])

    def decode(self, place: int) -> Image.Image:
        """One image, upright and in RGB; with an image size, short side resized and centre cropped."""
        colours = self.decode_upright(place)
        if self.image_size is None or colours.size == (self.image_size, self.image_size):
            return colours
        return transforms.center_crop(transforms.resize(colours, self.image_size), [self.image_size])

    def decode_upright(self, place: int) -> Image.Image:
        """One image, upright and in RGB, in its own size."""
        with self.open_image(place) as image:
            turned, form = turn_upright(image), image.format
        return to_rgb(turned, form, self.flag, self.name(place))

    def _large(self, place: int) -> bool:
        with self.open_image(place) as image:
            return image.width * image.height > LARGE


def turn_upright(image: Image.Image) -> Image.Image:
    """The image, read, and turned by its EXIF orientation; no other tag is looked at, as many are broken."""
    image.load()
    turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return image.copy() if turn is None else image.transpose(turn)


@dataclass(frozen=True)
class ImageFiles(ImageSource):
    """Files below `root`; `names` (n,) are paths as bytes, in one array: a list would take ten times as much."""

    flag = "data.root"
    root: Path
    names: np.ndarray

    def name(self, place: int) -> str:
        return str(self._path(place))

    def short_name(self, place: int) -> str:
        return os.fsdecode(self.names[place])

    def open_image(self, place: int) -> AbstractContextManager[Image.Image]:
        path = self._path(place)
        if path.exists() and not path.is_file():  # to read a pipe would wait for its writer
            raise DamagedImage(self.flag, str(path), "an image that can be read (it is no file)")
        return open_readable(path, self.flag, str(path))

    def cache_key(self) -> Iterator[bytes]:
        """Names, sizes and times."""
        yield self.all_names()
        yield self.sizes_and_times().tobytes()

    def all_names(self) -> bytes:
        return b"\0".join(self.names.tolist())

    def sizes_and_times(self) -> np.ndarray:
        """(n, 2) int64, 0 of a link that leads nowhere; in threads, as a network's disk takes long to answer."""
        with ThreadPoolExecutor(THREADS) as pool:
            return np.concatenate(list(pool.map(self._sizes_and_times, np.array_split(self.names, THREADS))))

    def _sizes_and_times(self, names: np.ndarray) -> np.ndarray:
        root, values = os.fsencode(self.root), np.zeros((len(names), 2), np.int64)
        for row, name in enumerate(names):
            with suppress(OSError):  # the image is named when it is wanted
                status = os.stat(os.path.join(root, name))  # noqa: PTH116, PTH118 - a Path takes four times as long
                values[row] = status.st_size, status.st_mtime_ns
        return values

    def content(self, place: int) -> bytes:
        return self._path(place).read_bytes()

    def part(self, chosen: Tensor) -> "ImageFiles":
        return replace(super().part(chosen), names=self.names[chosen.numpy()])

    def _path(self, place: int) -> Path:
        return self.root / os.fsdecode(self.names[place])


def with_progress(decoded: Iterable[T], total: int, step: int = 1) -> Iterator[T]:
    """Yield what decodes `step` images each, and print now and then how far it is."""
    printed = time.monotonic()
    for done, images in enumerate(decoded, 1):
        if time.monotonic() - printed > SILENCE:
            printed = time.monotonic()
            rank_zero_only(print)(f"decoded {done * step:,} of {total:,} images", flush=True)
        yield images


@contextmanager
def open_readable(file: Any, flag: str, name: str) -> Iterator[Image.Image]:
    """The open image of a path or a file, whose pixels are read on demand; DamagedImage names it if they can't be."""
    try:
        with Image.open(file) as image:
            yield image
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # whatever a decoder makes of bytes that are no image
        raise DamagedImage(flag, name, f"an image that can be read ({reason(error)})") from error


def to_rgb(image: Image.Image, form: str | None, flag: str, name: str) -> Image.Image:
    """The image in RGB; scales 16 bits of grey, and floats from 0 to 1, to 8 bits, where PIL would clip."""
    if image.mode != "F" and not image.mode.startswith("I"):
        return image.convert("RGB")
    values, white = np.asarray(image, np.float64), 1 if image.mode == "F" else 2**16 - 1
    unknown = image.mode == "I" and form not in {"PNG", "PPM"}  # PIL gives a PGM's greys as integers up to 65535
    if unknown or not 0 <= values.min() <= values.max() <= white:
        values_are = f"this one has {values.min():g} to {values.max():g}" + " in 32 bits" * unknown
        raise BadInput(flag, name, f"an image of 8 or 16 bits a channel, or floats from 0 to 1; {values_are}")
    return Image.fromarray((values * 255 / white).round().astype(np.uint8)).convert("RGB")
