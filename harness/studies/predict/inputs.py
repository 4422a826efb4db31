"""What a net predicts: images or texts that a user names, in a fixed order, and their labels if they have some."""

import csv
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from apprentice.errors import BadInput, reason
from datamodules.preparation import Preparation
from datamodules.raw import RawImages, encode_texts
from datamodules.splits import Split
from datamodules.streams import Streamed
from harness.runs.files import read_text

FLAG = "inputs"
# Heads of columns in a table of inputs.
FILES, TEXTS, LABELS = ("file", "path", "image", "filename", "file_name"), ("text", "sentence"), ("label", "class")


@dataclass(frozen=True)
class Inputs:
    """Samples by name, each once and in order."""

    names: list[str]
    images: RawImages | None = None
    texts: list[bytes] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # names of classes, "" for one that has no label
    skipped: Counter[str] = field(default_factory=Counter)  # kinds of other files beside them

    def samples(self, shape: tuple[int, ...], workers: int | None) -> Split | Streamed:
        """Return texts in memory, or images that so many workers read, by default one a core."""
        if self.images is not None:
            return Streamed(self.images, workers)
        return encode_texts(self.texts, *shape)


def read_inputs(place: Path, preparation: Preparation, classes: Sequence[str]) -> Inputs:
    """List the samples at a place: a folder, a file, or a table of files or texts.

    Labels are the names of folders that are classes, or a column; of texts also the names of files or what stands
    before a tab.

    Raises:
        BadInput: there is no such place, or there are no samples; or the net takes other inputs than images and texts.
    """
    if preparation.kind == "tensors":
        expected = "inputs of a net of images or of lines of text; this one's data makes them in a way of its own"
        raise BadInput(FLAG, place, expected)
    if not place.exists():
        raise BadInput(FLAG, place, "a folder, a file, or a table in CSV; there is none")
    if place.suffix.lower() == ".csv":
        return _of_table(place, preparation, classes)
    return _images(place, preparation.shape, classes) if preparation.kind == "images" else _texts(place, classes)


def _images(place: Path, shape: tuple[int, ...], classes: Sequence[str]) -> Inputs:
    skipped = Counter[str]()
    root, found = (place, list(_walk(place))) if place.is_dir() else (place.parent, [place.name])
    names = []
    for name in found:
        if any(part.startswith(".") for part in Path(name).parts):
            skipped["hidden"] += 1
        elif (kind := Path(name).suffix.lower()) in IMG_EXTENSIONS:
            names.append(name)
        else:
            skipped[kind or "without an extension"] += 1
    if not names:
        others = f"; there: {_counts(skipped)}" if skipped else "; it is empty"
        raise BadInput(FLAG, place, f"images ({', '.join(IMG_EXTENSIONS)}){others}")
    folders = [Path(name).parts[0] if len(Path(name).parts) > 1 else "" for name in names]
    labels = [folder if folder in classes else "" for folder in folders]
    return Inputs(names, RawImages(root, names, shape), labels=labels if any(labels) else [], skipped=skipped)


def _walk(folder: Path) -> Iterator[str]:
    """Yield the files below a folder, relative to it, in the order of their names."""
    paths = (Path(parent, name) for parent, _, files in os.walk(folder, followlinks=True) for name in files)
    yield from sorted(path.relative_to(folder).as_posix() for path in paths)


def _texts(place: Path, classes: Sequence[str]) -> Inputs:
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    names, texts, labels = [], [], []
    for file in files:
        lines = [(number, line) for number, line in enumerate(file.read_bytes().splitlines(), 1) if line.strip()]
        names += [f"{file.name}:{number}" for number, _ in lines]
        pairs = [line.partition(b"\t") for _, line in lines]
        heads = [head.decode(errors="replace").strip() for head, _, _ in pairs]
        if place.is_dir() or not all(head in classes and tab for head, (_, tab, _) in zip(heads, pairs, strict=True)):
            texts += [line for _, line in lines]
            labels += [file.stem if place.is_dir() and file.stem in classes else ""] * len(lines)
        else:
            texts += [text for _, _, text in pairs]
            labels += heads
    if not texts:
        raise BadInput(FLAG, place, "lines of text, in a file or in files *.txt of a folder; there are none")
    return Inputs(names, texts=texts, labels=labels if any(labels) else [])


def _of_table(place: Path, preparation: Preparation, classes: Sequence[str]) -> Inputs:
    """Read a table: a file or a text a row, and perhaps its class."""
    of_images = preparation.kind == "images"
    try:
        rows = list(csv.DictReader(read_text(place).splitlines()))
    except (OSError, ValueError, csv.Error) as error:
        raise BadInput(FLAG, place, f"a table in CSV and UTF-8 ({reason(error)})") from None
    heads = list(rows[0]) if rows else []
    column = next((head for head in (FILES if of_images else TEXTS) if head in heads), None)
    if column is None:
        wanted = " or ".join(FILES if of_images else TEXTS)
        raise BadInput(FLAG, place, f"a table with a row or more and a column {wanted}; it has {', '.join(heads)}")
    label = next((head for head in LABELS if head in heads), None)
    cells = [row[column] or "" for row in rows]
    labels = [(row[label] or "").strip() for row in rows] if label else []
    for number, name in enumerate(labels, 2):
        if name and name not in classes:
            raise BadInput(FLAG, f"{place}:{number}", f"one of the net's classes as {label}; it has {name}")
    if of_images:
        return Inputs(cells, RawImages(place.parent, cells, preparation.shape), labels=labels if any(labels) else [])
    names = [f"{place.name}:{number}" for number in range(2, len(cells) + 2)]
    return Inputs(names, texts=[cell.encode() for cell in cells], labels=labels if any(labels) else [])


def describe_skipped(inputs: Inputs) -> str:
    """Say which files beside the samples are skipped; empty if none are."""
    return f"skipped: {_counts(inputs.skipped)}" if inputs.skipped else ""


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
