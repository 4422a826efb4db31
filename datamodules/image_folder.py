"""A folder of the user's own images, decoded once and kept in memory."""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset
from torchvision.transforms import functional as transforms

from apprentice.errors import BadInput
from datamodules import memory
from datamodules.images import IMAGENET, ImageData
from datamodules.splits import Split

UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
SILENCE = 5.0  # seconds of decoding without a line
LARGE = 128 * 128  # pixels from which two threads decode faster than one; at 32 x 32 they take twice as long


class Files(NamedTuple):
    """Images on disk with labels (n,), to be resized to `image_size`, or all of the size of `first`."""

    paths: list[Path]
    labels: Tensor
    image_size: int | None
    first: Path

    def take(self, chosen: Tensor) -> Split:
        """Decode the chosen ones to (k, 3, H, W) uint8; BadInput names one that can't be read, or of another size."""
        height, width = size = self.size()
        paths = [self.paths[place] for place in chosen.tolist()]
        images = torch.empty(len(chosen), 3, height, width, dtype=torch.uint8)
        rows = images.numpy()

        def decode(row: int) -> None:
            pixels = np.asarray(self.open(paths[row]))
            if pixels.shape[:2] != size:
                found = f"{paths[row]} is {pixels.shape[1]}x{pixels.shape[0]} and {self.first} is {width}x{height}"
                raise BadInput("data.image_size", self.image_size, f"a size to bring all images to, as {found}")
            rows[row] = pixels.transpose(2, 0, 1)

        with readable(self.first) as image:
            is_large = image.width * image.height > LARGE
        said = time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for done, _ in enumerate((pool.map if is_large else map)(decode, range(len(paths))), 1):
                if time.monotonic() - said > SILENCE:
                    said = time.monotonic()
                    rank_zero_only(print)(f"ImageFolder: decoded {done:,} of {len(paths):,} images", flush=True)
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
        """(H, W) of the images in memory."""
        if self.image_size is not None:
            return self.image_size, self.image_size
        with readable(self.first) as image:
            upright = ImageOps.exif_transpose(image)
        return upright.height, upright.width


@contextmanager
def readable(path: Path) -> Iterator[Image.Image]:
    """An open image whose pixels are read on demand; BadInput names the file if they can't be."""
    try:
        with Image.open(path) as image:
            yield image
    except UNREADABLE as error:
        raise BadInput("data.root", path, f"an image that can be read ({error})") from error


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


class ImageFolder(ImageData):
    """Images in `root/train/<class>/` and `root/test/<class>/`, as RGB; decodes only the chosen subset.

    Class folders are searched recursively, as in torchvision. Hidden files and folders, and files that are no images,
    are skipped and counted in one line. Images are turned upright by their EXIF tags. Greys of 16 bits, and floats from
    0 to 1, are scaled to 8 bits.

    Args:
        root: the folder.
        image_size: resize the short side of each image to so many pixels, and crop the centre. Required unless all
            images have one size.
        options: those of ImageData; `mean` and `std` are ImageNet's by default.

    Raises:
        BadInput: the folder is not as described, an image can't be read, or all of them would not fit in memory.
    """

    mean, std = IMAGENET
    flips = True

    def __init__(self, root: str | Path = "data", image_size: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if image_size is not None and image_size < 1:
            raise BadInput("data.image_size", image_size, "at least 1 pixel")
        self.root, self.image_size = Path(root).expanduser(), image_size

    def read(self) -> tuple[Files, Files]:
        """List the files without decoding them."""
        skipped = Counter[str]()
        found = {part: self._samples(part, skipped) for part in ("train", "test")}
        names = {part: {path.relative_to(self.root / part).parts[0] for path, _ in found[part]} for part in found}
        for name in sorted(names["train"] ^ names["test"]):
            there, missing = ("train", "test") if name in names["train"] else ("test", "train")
            expected = f"the same classes in train/ and test/; {there}/{name} is not in {missing}/"
            raise BadInput("data.root", self.root, expected)
        self.class_names = tuple(sorted(names["train"]))
        if len(self.class_names) < 2:
            raise BadInput("data.root", self.root, f"at least 2 classes; there is one, {self.class_names[0]}")
        first = found["train"][0][0]
        train, test = (
            Files([path for path, _ in samples], torch.tensor([label for _, label in samples]), self.image_size, first)
            for samples in found.values()
        )
        self.input_shape = (3, *train.size())
        if skipped:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(skipped.items()))
            rank_zero_only(sys.stderr.write)(f"{self.name}: skipped in {self.root}: {counts}\n")
        return train, test

    def _samples(self, part: str, skipped: Counter[str]) -> list[tuple[Path, int]]:
        folder = self.root / part

        def is_image(file: str) -> bool:
            path = Path(file).relative_to(folder)
            taken = path.suffix.lower() in IMG_EXTENSIONS and not _hidden(path)
            skipped.update([] if taken else [_kind(path)])
            return taken

        try:
            names = [name for name in find_classes(folder)[0] if not _hidden(Path(name))]
            samples = make_dataset(folder, {name: label for label, name in enumerate(names)}, is_valid_file=is_image)
        except (OSError, ValueError) as error:
            wanted = f"images ({', '.join(IMG_EXTENSIONS)}) in train/<class>/ and test/<class>/"
            raise BadInput("data.root", self.root, f"{wanted}; {folder}: {str(error).rstrip('. ')}") from error
        skipped.update(_kind(path.relative_to(folder)) for path in folder.iterdir() if path.name not in names)
        return [(Path(path), label) for path, label in samples]

    def check_fits(self, count: int) -> None:
        """Raise BadInput if so many decoded images would not fit in the available memory."""
        need, have = count * int(np.prod(self.input_shape)), memory.available_bytes()
        if need > have:
            size = "x".join(map(str, self.input_shape))
            found = f"{count} of {size} take {need / 1e9:.2f} GB, {have / 1e9:.2f} GB are available"
            advice = "give a smaller --data.image_size, --data.train_size or --data.test_size"
            raise BadInput("data.root", self.root, f"images that fit in memory: {found}; {advice}")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str:
    if _hidden(path):
        return "hidden"
    return "outside a class" if len(path.parts) == 1 else path.suffix.lower() or "without an extension"
