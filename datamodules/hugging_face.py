"""Images of a data set of the Hugging Face hub, or of a local one."""

import io
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from apprentice.errors import BadInput, reason
from apprentice.extras import need
from datamodules.image_sources import DamagedImage, ImageSource, open_readable
from datamodules.stored_images import StoredImages

VALIDATION = ("validation", "valid", "val", "dev")  # names of a split for validation
HIDDEN = (None, -1)  # labels of images whose class is not told


@dataclass(frozen=True)
class ImageRows(ImageSource):
    """Images in a column of `data`, a split of that name; `places` (n,) are their rows."""

    flag = "data.path"
    data: Any  # datasets.Dataset
    column: str
    split: str
    places: np.ndarray

    def name(self, place: int) -> str:
        return f"{self.split}[{self.places[place]}]"

    def open_image(self, place: int) -> AbstractContextManager[Image.Image]:
        image = self.data[int(self.places[place])][self.column]
        if image is None:
            raise DamagedImage(self.flag, self.name(place), "an image; there is none")
        file = image["path"] if image["bytes"] is None else io.BytesIO(image["bytes"])
        return open_readable(file, self.flag, self.name(place))

    def cache_key(self) -> Iterator[bytes]:
        """The split's fingerprint, and the rows."""
        yield f"{self.data._fingerprint} {self.column}".encode()
        yield self.places.tobytes()

    def all_names(self) -> bytes:
        """Of the split: rows have none."""
        return self.split.encode()

    def sizes_and_times(self) -> np.ndarray:
        """(n, 2) int64; of images that are in the table without reading them."""
        import pyarrow.compute

        cells = self.data.with_format("arrow")[:][self.column]
        paths, stored = (pyarrow.compute.struct_field(cells, name) for name in ("path", "bytes"))
        sizes = pyarrow.compute.fill_null(pyarrow.compute.binary_length(stored), -1).to_numpy()[self.places]
        sizes_and_times = np.stack([sizes, np.zeros_like(sizes)], 1).astype(np.int64)
        for place in (sizes < 0).nonzero()[0].tolist():
            stat = Path(paths[int(self.places[place])].as_py()).stat()
            sizes_and_times[place] = stat.st_size, stat.st_mtime_ns
        return sizes_and_times

    def content(self, place: int) -> bytes:
        image = self.data[int(self.places[place])][self.column]
        return image["bytes"] if image["bytes"] is not None else Path(image["path"]).read_bytes()

    def part(self, chosen: Tensor) -> "ImageRows":
        return replace(super().part(chosen), places=self.places[chosen.numpy()])


class HuggingFaceImages(StoredImages):
    """Images of a data set of the Hugging Face hub by its name, or of a local folder; needs the extra `datasets`.

    With a split `validation` (`valid`, `val`, `dev`) beside `train` and `test`, it is validated on. Without a labelled
    `test` it is tested on, and training images are held out for validation; without both, images are drawn from `train`
    for testing, too (`test_size`). A line says so. Splits may number classes in orders of their own: those of `train`
    count, by name.

    Args:
        path: the data set's name, a folder of files that `load_dataset` reads, or one that `save_to_disk` wrote.
        config: its configuration, if it has several.
        image: the column of images; default: the first.
        label: the column of labels; default: the first of classes, or `label`.
        options: those of StoredImages.

    Raises:
        Missing: datasets is not installed.
        BadInput: the data set can't be loaded, has no such column or split, labels that are no classes, or a sample
            without a class of `train`'s, or as in StoredImages.
    """

    def __init__(
        self,
        path: str,
        image_size: int | None = None,
        *,
        config: str | None = None,
        image: str | None = None,
        label: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(image_size, **options)
        self.path, self.config, self.image, self.label = path, config, image, label

    def images_folder(self) -> Path:
        import datasets

        return Path(self.path) if Path(self.path).is_dir() else Path(datasets.config.HF_DATASETS_CACHE)

    def prepare_data(self) -> None:
        """Download the data set, unless that is done; Lightning calls this in one process of each machine."""
        if not self._splits:
            self._load()

    def read(self) -> tuple[ImageSource, ...]:
        """Open the splits without decoding an image."""
        splits = self._load()
        image, label = self._columns(splits["train"].features)
        validation = next((name for name in VALIDATION if name in splits), None)
        used = [name for name in ("train", "test", validation) if name is not None and name in splits]
        labels = {name: self._read_labels(splits[name], label, name) for name in used}
        self.class_names, _ = labels["train"]
        if len(self.class_names) < 2:
            raise BadInput("data.label", label, f"at least 2 classes; there are {len(self.class_names)}")
        self._check_files(label)
        names, sets = {name: rows for name, (_, rows) in labels.items()}, {}
        for part, split in self._choose_parts(names, validation).items():
            numbers = self._class_numbers(names[split], split)
            data, rows = self._disable_decoding(splits[split], image), np.arange(len(numbers))
            sets[part] = ImageRows(numbers, self.image_size, data, image, split, rows)
        return self.prepare_sets(sets, Counter(), self.path)

    def _load(self) -> Any:
        need("datasets", "datasets")
        import datasets

        datasets.disable_progress_bars()
        try:
            saved = (Path(self.path) / "dataset_dict.json").is_file()
            splits = datasets.load_from_disk(self.path) if saved else datasets.load_dataset(self.path, self.config)
        except Exception as error:  # whatever a data set's own reader does
            raise BadInput(
                "data.path", self.path, f"a data set of images, by name or folder; {reason(error)}"
            ) from error
        if "train" not in splits:
            raise BadInput("data.path", self.path, f"a split train; it has {', '.join(splits)}")
        return splits

    def _columns(self, features: Any) -> tuple[str, str]:
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        image = self.image or next((name for name, kind in kinds.items() if kind == "Image"), "image")
        label = self.label or next((name for name, kind in kinds.items() if kind == "ClassLabel"), "label")
        for option, column in (("image", image), ("label", label)):
            if column not in kinds:
                raise BadInput(f"data.{option}", column, f"a column of the data set, one of {', '.join(kinds)}")
        if kinds[image] != "Image":
            raise BadInput("data.image", image, f"a column of images; it is of {kinds[image]}")
        return image, label

    def _read_labels(self, data: Any, label: str, split: str) -> tuple[tuple[str, ...], list[str | None]]:
        """The names of a split's classes, in its order, and of each row's class; None for a hidden one."""
        if label not in data.features:
            return (), [None] * len(data)
        feature, values = data.features[label], data.select_columns([label])[:][label]
        if (names := getattr(feature, "names", None)) is not None:
            known = dict(enumerate(names))  # some readers don't look whether a label is one of them
            return tuple(names), [None if value in HIDDEN else known.get(value, str(value)) for value in values]
        kind = getattr(feature, "dtype", None) if type(feature).__name__ == "Value" else type(feature).__name__
        if not str(kind).startswith(("int", "uint", "string", "large_string", "bool")):
            expected = f"a column with one class of each image, as ClassLabel, whole numbers or texts; in {split}"
            raise BadInput("data.label", label, f"{expected} it is of {kind}")
        ordered = sorted({value for value in values if value is not None})
        return tuple(map(str, ordered)), [None if value is None else str(value) for value in values]

    def _check_files(self, label: str) -> None:
        """Raise BadInput if a Parquet file has classes of its own: `load_dataset` reads all with those of the first."""
        import pyarrow.parquet

        for file in sorted(Path(self.path).rglob("*.parquet")) if self.config is None else ():
            metadata = json.loads((pyarrow.parquet.read_schema(file).metadata or {}).get(b"huggingface", b"{}"))
            names = metadata.get("info", {}).get("features", {}).get(label, {}).get("names", self.class_names)
            if tuple(names) != self.class_names:
                listed = f"the classes {', '.join(self.class_names)} in this order, as in train"
                raise BadInput("data.path", file, f"{listed}; `save_to_disk` keeps those of each split")

    def _class_numbers(self, names: list[str | None], split: str) -> Tensor:
        """(n,) int64, the places of a split's classes in those of the training set, whose names count."""
        numbers = {name: number for number, name in enumerate(self.class_names)}
        if (row := next((row for row, name in enumerate(names) if name not in numbers), None)) is not None:
            fault = f"{split}[{row}] has {'no label' if names[row] is None else names[row]}"
            raise BadInput("data.path", self.path, f"a label of the training set's classes for all of {split}; {fault}")
        return torch.tensor([numbers[str(name)] for name in names])

    def _choose_parts(self, names: dict[str, list[str | None]], validation: str | None) -> dict[str, str]:
        """The split of train, of test if there are labels, and of validation if it has one, which is `validation`."""
        hidden = {None, "-1"} - {*self.class_names}
        if not set(names.get("test", ())) <= hidden:
            return {"train": "train", "test": "test"} | ({"validation": validation} if validation else {})
        missing = "has no labels" if "test" in names else "is not there"
        if validation is None:
            self.say(f"the split test {missing}: test images are drawn from train")
            return {"train": "train"}
        self.say(f"the split test {missing}: tests on {validation}, validates on images held out from train")
        return {"train": "train", "test": validation}

    def _disable_decoding(self, data: Any, image: str) -> Any:
        """The split without decoding."""
        import datasets

        return data.select_columns([image]).cast_column(image, datasets.Image(decode=False))
