"""A folder of the user's own images, kept in memory or decoded on disk, or read anew while training."""

import csv
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from apprentice.errors import BadInput
from datamodules import memory
from datamodules.decoded import Decoded
from datamodules.files import Damaged, Files
from datamodules.images import IMAGENET, ImageData
from datamodules.splits import Samples, Source, Split
from datamodules.streams import Streamed, reading

Cache = Literal["memory", "disk", "none"]
OnError = Literal["stop", "skip"]
VALIDATION = ("val", "valid", "validation")  # names of a folder for validation
ANNOTATIONS = "val_annotations.txt"  # Tiny-ImageNet's labels of val/images
CHECKED = 64  # images that a worker checks at once


class ImageFolder(ImageData):
    """Images in `root/train/<class>/` and `root/test/<class>/`, as RGB; decodes only the chosen subset.

    With `root/val/<class>/` beside them, these are validated on. Without a labelled `test/`, as in ImageNet and
    Tiny-ImageNet, `val/` is tested on, and training images are held out for validation. A line says so.

    Class folders are searched recursively, as in torchvision. Hidden files and folders, and files that are no images,
    are skipped and counted in one line. Images are turned upright by their EXIF tags. Greys of 16 bits, and floats from
    0 to 1, are scaled to 8 bits.

    Args:
        root: the folder.
        image_size: resize the short side of each image to so many pixels, and crop the centre. Required unless all
            images have one size.
        cache: where decoded images are kept: in `memory`; on `disk`, written before training unless an earlier run has
            done it; or nowhere, `none`: then each is decoded whenever it is wanted. Default: in memory if they fit,
            otherwise nowhere. Results do not depend on it.
        cache_dir: the folder of the cache on disk; default: `.apprentice` in `root`. It may be deleted at any time.
        num_workers: processes for each device that read, and augment, ahead; with `memory`, that only augment. Default:
            this machine's cores over its devices, and none with `memory` or `disk`. Results do not depend on it.
        on_error: what an image that can't be read does: `stop` the run, or have it checked before training, in one pass
            over all images, and `skip` what can't be read, counted in a line.
        options: those of ImageData; `mean` and `std` are ImageNet's by default.

    Raises:
        BadInput: the folder is not as described, an image can't be read, or all of them would not fit in memory.
    """

    mean, std = IMAGENET
    flips = True
    free_options = ImageData.free_options | {"cache", "cache_dir"}

    def __init__(
        self,
        root: str | Path = "data",
        image_size: int | None = None,
        *,
        cache: Cache | None = None,
        cache_dir: str | Path | None = None,
        num_workers: int | None = None,
        on_error: OnError = "stop",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if image_size is not None and image_size < 1:
            raise BadInput("data.image_size", image_size, "at least 1 pixel")
        if cache not in {None, *get_args(Cache)}:
            raise BadInput("data.cache", cache, " or ".join(get_args(Cache)))
        if on_error not in get_args(OnError):
            raise BadInput("data.on_error", on_error, " or ".join(get_args(OnError)))
        if num_workers is not None and num_workers < 0:
            raise BadInput("data.num_workers", num_workers, "a number of processes: 0, 1, 2, …")
        self.root, self.image_size = Path(root).expanduser(), image_size
        self.cache, self.num_workers, self.on_error = cache, num_workers, on_error
        self.cache_dir = self.root / ".apprentice" if cache_dir is None else Path(cache_dir).expanduser()

    def read(self) -> tuple[Files, ...]:  # type: ignore[override]  # two or three
        """List the files without decoding them."""
        skipped = Counter[str]()
        folders = self._folders()
        found = {part: self._samples(folder, skipped) for part, folder in folders.items()}
        names = {part: {name for _, name in samples} for part, samples in found.items()}
        for part, folder in folders.items():
            for name in sorted(names["train"] ^ names[part]):
                there, missing = ("train", folder) if name in names["train"] else (folder, "train")
                expected = f"the same classes in train/ and {folder}/; {there}/{name} is not in {missing}/"
                raise BadInput("data.root", self.root, expected)
        self.class_names = tuple(sorted(names["train"]))
        if len(self.class_names) < 2:
            raise BadInput("data.root", self.root, f"at least 2 classes; there is one, {self.class_names[0]}")
        sets = {part: self._files(samples, found["train"][0][0]) for part, samples in found.items()}
        if self.on_error == "skip":
            sets = {part: self._without_damaged(files, skipped) for part, files in sets.items()}
        self.input_shape = (3, *sets["train"].size())
        if skipped:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(skipped.items()))
            self._say(f"skipped in {self.root}: {counts}")
        return tuple(sets.values())

    def _folders(self) -> dict[str, str]:
        """The folder of each part: of train and test, and of validation if it has one of its own."""
        own = next((name for name in VALIDATION if (self.root / name).is_dir()), None)
        test = self.root / "test"
        classes = {path.name for path in (self.root / "train").glob("*/")}
        if own is None or (test.is_dir() and {path.name for path in test.glob("*/")} & classes):
            return {"train": "train", "test": "test"} | ({"validation": own} if own else {})
        missing = "has no labels" if test.is_dir() else "is not there"
        self._say(f"{self.root / 'test'} {missing}: tests on {own}/, validates on images held out from train/")
        return {"train": "train", "test": own}

    def _samples(self, part: str, skipped: Counter[str]) -> list[tuple[Path, str]]:
        """Images and their classes, sorted by both."""
        folder = self.root / part
        if (folder / ANNOTATIONS).is_file():
            return self._annotated(folder)

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
        return [(Path(path), names[label]) for path, label in samples]

    def _annotated(self, folder: Path) -> list[tuple[Path, str]]:
        """Tiny-ImageNet's images for validation, whose file names and classes are in a table."""
        with (folder / ANNOTATIONS).open(newline="") as table:
            rows = [row for row in csv.reader(table, delimiter="\t") if row]
        if not rows or min(map(len, rows)) < 2:
            raise BadInput("data.root", folder / ANNOTATIONS, "a table of file names and classes, cut by tabs")
        return sorted(((folder / "images" / row[0], row[1]) for row in rows), key=lambda sample: (sample[1], sample[0]))

    def _files(self, samples: list[tuple[Path, str]], first: Path) -> Files:
        labels = {name: label for label, name in enumerate(self.class_names)}
        names = np.array([os.fsencode(path.relative_to(self.root)) for path, _ in samples])
        return Files(self.root, names, torch.tensor([labels[name] for _, name in samples]), self.image_size, first)

    def _without_damaged(self, files: Files, skipped: Counter[str]) -> Files:
        """The files that can be read; every one is."""
        places = torch.arange(len(files.labels))
        checked = reading(Streamed(_Checked(files), self.num_workers), places.split(CHECKED))
        whole = torch.cat([split.inputs for split in checked])
        if damaged := int((~whole).sum()):
            skipped.update({"damaged": damaged})
        return files.part(whole.nonzero().flatten())

    def _say(self, line: str) -> None:
        rank_zero_only(sys.stderr.write)(f"{self.name}: {line}\n")

    def check_fits(self, count: int) -> None:
        """Choose where images are kept, if that is not given; BadInput if they would not fit in memory, but shall."""
        need, have = count * int(np.prod(self.input_shape)), memory.available_bytes()
        if need > have and self.cache in {None, "memory"}:
            size = "x".join(map(str, self.input_shape))
            found = f"{count} of {size} take {need / 1e9:.2f} GB, {have / 1e9:.2f} GB are available"
            if self.cache == "memory":
                advice = (
                    "give --data.cache disk or none, a smaller --data.image_size, --data.train_size or --data.test_size"
                )
                raise BadInput("data.cache", self.cache, f"images that fit in memory: {found}; {advice}")
            self._say(f"images are read while training (--data.cache none): {found}")
            self.cache = "none"

    def hold(self, source: Source, places: Tensor) -> Samples | Streamed:
        """Decoded images in memory or on disk, or files that are read while training."""
        files = cast("Files", source)
        if self.cache == "none":
            return Streamed(files.part(places), self.num_workers)
        if self.cache == "disk":
            return Streamed(Decoded(files, places, self.cache_dir, self.num_workers), self.num_workers or 0)
        decoded = files.take(places)
        return Streamed(decoded, self.num_workers) if self.num_workers else decoded


class _Checked(NamedTuple):
    """Whether files can be read, in place of their pixels."""

    files: Files

    @property
    def labels(self) -> Tensor:
        """(n,), of the files."""
        return self.files.labels

    def take(self, chosen: Tensor) -> Split:
        """(k,) bool for each of the chosen."""
        return Split(torch.tensor([self._readable(place) for place in chosen.tolist()]), self.labels[chosen])

    def _readable(self, place: int) -> bool:
        try:
            self.files.open(self.files.path(place))
        except Damaged:
            return False
        return True


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str:
    if _hidden(path):
        return "hidden"
    return "outside a class" if len(path.parts) == 1 else path.suffix.lower() or "without an extension"
