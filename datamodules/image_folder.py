"""A folder of the user's own images."""

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from apprentice.errors import BadInput
from datamodules.encoded import Encoded, Files
from datamodules.stored_images import StoredImages

VALIDATION = ("val", "valid", "validation")  # names of a folder for validation
ANNOTATIONS = "val_annotations.txt"  # Tiny-ImageNet's labels of val/images


class ImageFolder(StoredImages):
    """Images in `root/train/<class>/` and `root/test/<class>/`, as RGB; decodes only the chosen subset.

    A run validates on `root/val/<class>/`, if that is there. Without a labelled `test/`, as in ImageNet and
    Tiny-ImageNet, it tests on `val/` and validates on images held out from training. A line says so.

    Class folders are searched recursively, as in torchvision. Hidden files and folders, and files that are no images,
    are skipped and counted in one line.

    Args:
        root: the folder.
        options: those of StoredImages.
    """

    def __init__(self, root: str | Path = "data", image_size: int | None = None, **options: Any) -> None:
        super().__init__(image_size, **options)
        self.root = Path(root).expanduser()

    def beside(self) -> Path:
        return self.root

    def read(self) -> tuple[Encoded, ...]:  # type: ignore[override]  # two or three
        skipped = Counter[str]()
        folders = self._folders()
        samples = {part: self._samples(folder, skipped) for part, folder in folders.items()}
        names = {part: {name for _, name in pairs} for part, pairs in samples.items()}
        for part, folder in folders.items():
            for name in sorted(names["train"] ^ names[part]):
                there, missing = ("train", folder) if name in names["train"] else (folder, "train")
                expected = f"the same classes in train/ and {folder}/; {there}/{name} is not in {missing}/"
                raise BadInput("data.root", self.root, expected)
        self.class_names = tuple(sorted(names["train"]))
        if len(self.class_names) < 2:
            raise BadInput("data.root", self.root, f"at least 2 classes; there is one, {self.class_names[0]}")
        return self.usable({part: self._files(pairs) for part, pairs in samples.items()}, skipped, self.root)

    def _folders(self) -> dict[str, str]:
        """Return the folders of train and test, and of validation if there is one beside test."""
        validation = next((name for name in VALIDATION if (self.root / name).is_dir()), None)
        test = self.root / "test"
        classes = {path.name for path in (self.root / "train").glob("*/")}
        if validation is None or (test.is_dir() and {path.name for path in test.glob("*/")} & classes):
            return {"train": "train", "test": "test"} | ({"validation": validation} if validation else {})
        missing = "has no labels" if test.is_dir() else "is not there"
        self.say(f"{test} {missing}: tests on {validation}/, validates on images held out from train/")
        return {"train": "train", "test": validation}

    def _samples(self, part: str, skipped: Counter[str]) -> list[tuple[Path, str]]:
        """Return images and their classes, sorted by both."""
        folder = self.root / part
        if (folder / ANNOTATIONS).is_file():
            return self._annotated(folder)

        def is_image(file: str) -> bool:
            path = Path(file).relative_to(folder)
            is_visible = path.suffix.lower() in IMG_EXTENSIONS and not _is_hidden(path)
            if not is_visible:
                skipped.update([_kind(path)])
            return is_visible

        try:
            names = [name for name in find_classes(folder)[0] if not _is_hidden(Path(name))]
            samples = make_dataset(folder, {name: label for label, name in enumerate(names)}, is_valid_file=is_image)
        except (OSError, ValueError) as error:
            expected = f"images ({', '.join(IMG_EXTENSIONS)}) in train/<class>/ and test/<class>/"
            raise BadInput("data.root", self.root, f"{expected}; {folder}: {str(error).rstrip('. ')}") from error
        skipped.update(_kind(path.relative_to(folder)) for path in folder.iterdir() if path.name not in names)
        return [(Path(path), names[label]) for path, label in samples]

    def _annotated(self, folder: Path) -> list[tuple[Path, str]]:
        """Return Tiny-ImageNet's images for validation, whose file names and classes are in a table."""
        with (folder / ANNOTATIONS).open(newline="") as table:
            rows = [row for row in csv.reader(table, delimiter="\t") if row]
        if not rows or min(map(len, rows)) < 2:
            raise BadInput("data.root", folder / ANNOTATIONS, "a table of file names and classes, cut by tabs")
        return sorted(((folder / "images" / row[0], row[1]) for row in rows), key=lambda sample: (sample[1], sample[0]))

    def _files(self, samples: list[tuple[Path, str]]) -> Files:
        numbers = {name: label for label, name in enumerate(self.class_names)}
        names = np.array([os.fsencode(path.relative_to(self.root)) for path, _ in samples])
        labels = torch.tensor([numbers[name] for _, name in samples])
        return Files(labels, self.image_size, self.root, names)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str:
    if _is_hidden(path):
        return "hidden"
    return "outside a class" if len(path.parts) == 1 else path.suffix.lower() or "without an extension"
