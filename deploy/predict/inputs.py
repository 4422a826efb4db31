"""What a net predicts: images or texts that a user names, in a fixed order, and their labels if they have some."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from apprentice.errors import BadInput
from datamodules.files import LABELS, PATHS, TEXTS, check_file, find_column, read_csv, walk
from datamodules.preparation import Preparation
from datamodules.splits import Split
from datamodules.streams import SampleStream
from deploy.predict.raw import RawImages, encode_texts
from harness.runs.quiet import notice

FLAG = "inputs"


@dataclass(frozen=True)
class Inputs:
    """Samples by name, each once and in order."""

    names: list[str]
    images: RawImages | None = None
    texts: list[bytes] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # names of classes, "" for one that has no label
    skipped: Counter[str] = field(default_factory=Counter)  # kinds of other files beside them

    def samples(self, shape: tuple[int, ...], workers: int | None) -> Split | SampleStream:
        """Return texts in memory, or images that so many workers read, by default one a core."""
        if self.images is not None:
            return SampleStream(self.images, workers)
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
    if not place.is_dir():
        check_file(place, FLAG, "a folder, a file, or a table in CSV")
    if place.suffix.lower() == ".csv":
        return _of_table(place, preparation, classes)
    return _images(place, preparation.shape, classes) if preparation.kind == "images" else _texts(place, classes)


def _images(place: Path, shape: tuple[int, ...], classes: Sequence[str]) -> Inputs:
    skipped = Counter[str]()
    root, paths = (place, _walk(place, skipped)) if place.is_dir() else (place.parent, [place.name])
    names = []
    for name in paths:
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


def _walk(folder: Path, skipped: Counter[str]) -> list[str]:
    """Return the files below a folder, relative to it, in the order of their names."""
    return sorted(path.relative_to(folder).as_posix() for path in walk(folder, skipped))


def _texts(place: Path, classes: Sequence[str]) -> Inputs:
    files = sorted(file for file in place.glob("*.txt") if file.is_file()) if place.is_dir() else [place]
    names, texts, labels = [], [], []
    for file in files:
        lines = [(number, line) for number, line in enumerate(file.read_bytes().splitlines(), 1) if line.strip()]
        names += [f"{file.name}:{number}" for number, _ in lines]
        pairs = [line.partition(b"\t") for _, line in lines]
        heads = [head.decode(errors="replace").strip() if tab else "" for head, tab, _ in pairs]
        if place.is_dir() or not _are_labelled(heads, [number for number, _ in lines], file, classes):
            texts += [line for _, line in lines]
            labels += [file.stem if place.is_dir() and file.stem in classes else ""] * len(lines)
        else:
            texts += [text for _, _, text in pairs]
            labels += heads
    if not texts:
        raise BadInput(FLAG, place, "lines of text, in a file or in files *.txt of a folder; there are none")
    return Inputs(names, texts=texts, labels=labels if any(labels) else [])


def _are_labelled(heads: Sequence[str], numbers: Sequence[int], file: Path, classes: Sequence[str]) -> bool:
    """Return whether what stands before tabs in lines are classes; BadInput for a line that is not as most are."""
    others = [(number, head) for number, head in zip(numbers, heads, strict=True) if head not in classes]
    if 2 * len(others) >= len(heads):
        if known := len(heads) - len(others):
            notice(f"{file}: {known} of {len(heads)} lines begin with a class and a tab; taken as texts without labels")
        return False
    if others:
        number, head = others[0]
        expected = "one of the net's classes before a tab, as in most lines"
        raise BadInput(FLAG, f"{file}:{number}", f"{expected}; it has {head or 'no tab'}")
    return True


def _of_table(place: Path, preparation: Preparation, classes: Sequence[str]) -> Inputs:
    """Read a table: a file or a text a row, and perhaps its class."""
    of_images = preparation.kind == "images"
    columns, usual = read_csv(place, FLAG), PATHS if of_images else TEXTS
    column, label = find_column(columns, usual), find_column(columns, LABELS)
    if column is None:
        raise BadInput(FLAG, place, f"a table with a column {' or '.join(usual)}; it has {', '.join(columns)}")
    cells = [cell.strip() for cell in columns[column]] if of_images else columns[column]
    labels = [cell.strip() for cell in columns[label]] if label else []
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
