"""A folder of the user's own images."""

import csv
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes

from apprentice.errors import BadInput
from datamodules.files import walk
from datamodules.image_sources import ImageFiles, ImageSource
from datamodules.images import EMBEDDING
from datamodules.stored_images import FOLDER, StoredImages

# Names of folders, in any case.
TRAIN, TEST, VALIDATION = ("train", "training"), ("test", "testing"), ("val", "valid", "validation")
UNSORTED = "images"  # stands for a class where there are none
FLAT = "."  # the folder of a set that is not split
ANNOTATIONS = "val_annotations.txt"  # Tiny-ImageNet's labels of val/images


class ImageFolder(StoredImages):
    """Images in `root/train/<class>/` and `root/test/<class>/`, or in `root/<class>/`, as RGB; decodes what is chosen.

    A run validates on `root/val/<class>/`, if that is there. Without a labelled `test/`, as in ImageNet and
    Tiny-ImageNet, it tests on `val/` and validates on images held out from training. Without both, and where `root` has
    class folders alone, test images are drawn by class, too (`test_size`). A line says so. Case does not matter in the
    names of these folders. A folder of such a name without class folders, beside others, is a class (trains, cars).

    Class folders are searched recursively, as in torchvision. Hidden files and folders, and files that are no images,
    are skipped and counted in one line. With `task` embedding, images need no class folders.

    Args:
        root: the folder.
        options: those of StoredImages.
    """

    def __init__(self, root: str | Path = "data", image_size: int | None = None, **options: Any) -> None:
        super().__init__(image_size, **options)
        self.root = Path(root).expanduser()

    def images_folder(self) -> Path:
        return self.root

    def read(self) -> tuple[ImageSource, ...]:
        if self.root.is_file():
            raise BadInput("data.root", self.root, "a folder; `data ImageTable` reads a table of images")
        skipped = Counter[str]()
        folders = self._folders()
        samples = {part: self._samples(folder, skipped) for part, folder in folders.items()}
        names = {part: {name for _, name in pairs} for part, pairs in samples.items()}
        for part, folder in folders.items():
            for name in sorted(names["train"] ^ names[part]):
                there, missing = (folders["train"], folder)[:: 1 if name in names["train"] else -1]
                expected = f"the same classes in {folders['train']}/ and {folder}/; {there}/{name} is not in {missing}/"
                raise BadInput("data.root", self.root, expected)
        self.class_names = tuple(sorted(names["train"]))
        if len(self.class_names) < 2 and self.task != EMBEDDING:
            raise BadInput("data.root", self.root, f"at least 2 classes; there is one, {self.class_names[0]}")
        return self.prepare_sets({part: self._files(pairs) for part, pairs in samples.items()}, skipped, self.root)

    def _folders(self) -> dict[str, str]:
        """Return the folder of train, that of test if there is one, and of validation if there is one beside test."""
        train, test, validation = (self._find(names) for names in (TRAIN, TEST, VALIDATION))
        if train is None and not (test or validation):
            return {"train": FLAT}
        if self.task == EMBEDDING and train and test:
            return {"train": train, "test": test} | ({"validation": validation} if validation else {})
        parts = [folder for folder in (train, test, validation) if folder is not None]
        if self._classes(".") - {*parts} and not any(map(self._has_classes, parts)):
            named = ", ".join(f"{folder}/" for folder in parts)
            self.say(f"{named} beside other folders, and without class folders: taken for a class")
            return {"train": FLAT}
        train = train or TRAIN[0]
        tested = set() if test is None else self._classes(test)
        if test is not None and (tested & self._classes(train) or (tested and validation is None)):
            return {"train": train, "test": test} | ({"validation": validation} if validation else {})
        missing = f"{self.root / (test or TEST[0])} {'is not there' if test is None else 'has no labels'}"
        if validation is None:
            self.say(f"{missing}: test images are drawn from {train}/")
            return {"train": train}
        self.say(f"{missing}: tests on {validation}/, validates on images held out from {train}/")
        return {"train": train, "test": validation}

    def _find(self, names: tuple[str, ...]) -> str | None:
        """Return the folder with the first of these names, in any case; BadInput if several have it."""
        folders = sorted(path.name for path in self.root.glob("*/"))
        for name in names:
            matching = [folder for folder in folders if folder.lower() == name]
            if len(matching) > 1:
                raise BadInput("data.root", self.root, f"one folder {name}/; there are {' and '.join(matching)}")
            if matching:
                return matching[0]
        return None

    def _classes(self, folder: str) -> set[str]:
        return {path.name for path in (self.root / folder).glob("*/") if not path.name.startswith(".")}

    def _has_classes(self, folder: str) -> bool:
        return bool(self._classes(folder)) or (self.root / folder / ANNOTATIONS).is_file()

    def _samples(self, part: str, skipped: Counter[str]) -> list[tuple[Path, str]]:
        """Return images and their classes, sorted by both."""
        folder = self.root / part
        if (folder / ANNOTATIONS).is_file():
            return self._read_annotations(folder)

        def is_image(file: Path) -> bool:
            path = file.relative_to(folder)
            is_visible = path.suffix.lower() in IMG_EXTENSIONS and not _is_hidden(path)
            if not is_visible:
                skipped.update([_kind(path)])
            return is_visible

        def images_in(place: Path) -> list[Path]:
            return sorted(filter(is_image, walk(place, skipped)), key=lambda path: (str(path.parent), path))

        if self.task == EMBEDDING and (_has_images(folder) or not self._classes(part)):
            if unsorted := images_in(folder):
                return [(path, UNSORTED) for path in unsorted]
            raise BadInput("data.root", self.root, f"images ({', '.join(IMG_EXTENSIONS)}) in it; {folder} has none")
        try:
            names = [name for name in find_classes(folder)[0] if not _is_hidden(Path(name))]
            files_of = {name: images_in(folder / name) for name in names}
            if not names:
                raise ValueError("Found no class folder")
            if empty := [name for name in names if not files_of[name]]:
                raise ValueError(f"Found no valid file for the classes {', '.join(empty)}")
        except (OSError, ValueError) as error:
            expected = f"images ({', '.join(IMG_EXTENSIONS)}) in train/<class>/ and test/<class>/, or in <class>/"
            fault = getattr(error, "strerror", None) or str(error).rstrip(". ")
            raise BadInput("data.root", self.root, f"{expected}; {folder}: {fault}") from error
        skipped.update(
            _kind(path.relative_to(folder)) for path in folder.iterdir() if path.name not in {*names, FOLDER}
        )
        return [(path, name) for name in names for path in files_of[name]]

    def _read_annotations(self, folder: Path) -> list[tuple[Path, str]]:
        """Return Tiny-ImageNet's images for validation, whose file names and classes are in a table."""
        with (folder / ANNOTATIONS).open(newline="") as table:
            rows = [row for row in csv.reader(table, delimiter="\t") if row]
        if not rows or min(map(len, rows)) < 2:
            raise BadInput("data.root", folder / ANNOTATIONS, "a table of file names and classes, cut by tabs")
        return sorted(((folder / "images" / row[0], row[1]) for row in rows), key=lambda sample: (sample[1], sample[0]))

    def _files(self, samples: list[tuple[Path, str]]) -> ImageFiles:
        numbers = {name: label for label, name in enumerate(self.class_names)}
        names = np.array([os.fsencode(path.relative_to(self.root)) for path, _ in samples])
        labels = torch.tensor([numbers[name] for _, name in samples])
        return ImageFiles(labels, self.image_size, self.root, names)


def _has_images(folder: Path) -> bool:
    """Return whether images lie in a folder itself."""
    return any(file.suffix.lower() in IMG_EXTENSIONS and not _is_hidden(Path(file.name)) for file in folder.glob("*.*"))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _kind(path: Path) -> str:
    if _is_hidden(path):
        return "hidden"
    return "outside a class" if len(path.parts) == 1 else path.suffix.lower() or "without an extension"
