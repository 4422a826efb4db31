"""Images of a data set of the Hugging Face hub, or of a local one."""

import io
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
from datamodules.encoded import Encoded, readable, size_of
from datamodules.stored_images import StoredImages

VALIDATION = ("validation", "valid", "val", "dev")  # names of a split for validation


@dataclass(frozen=True)
class Rows(Encoded):
    """Images in a column of `data`, a split of that name; `places` (n,) are their rows."""

    flag = "data.path"
    data: Any  # datasets.Dataset
    column: str
    split: str
    places: np.ndarray

    def name(self, place: int) -> str:
        """Split and row."""
        return f"{self.split}[{self.places[place]}]"

    def opened(self, place: int) -> AbstractContextManager[Image.Image]:
        """From its bytes, or as a file."""
        found = self.data[int(self.places[place])][self.column]
        file = found["path"] if found["bytes"] is None else io.BytesIO(found["bytes"])
        return readable(file, self.flag, self.name(place))

    def made_of(self) -> Iterator[bytes]:
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
        found = np.stack([sizes, np.zeros_like(sizes)], 1).astype(np.int64)
        for place in (sizes < 0).nonzero()[0].tolist():
            stat = Path(paths[int(self.places[place])].as_py()).stat()
            found[place] = stat.st_size, stat.st_mtime_ns
        return found

    def content(self, place: int) -> bytes:
        """Its bytes, or its file's."""
        found = self.data[int(self.places[place])][self.column]
        return found["bytes"] if found["bytes"] is not None else Path(found["path"]).read_bytes()

    def part(self, chosen: Tensor) -> "Rows":
        """The images at these (k,) places."""
        return replace(super().part(chosen), places=self.places[chosen.numpy()])


class HuggingFaceImages(StoredImages):
    """Images of a data set of the Hugging Face hub by its name, or of a local folder; needs the extra `datasets`.

    With a split `validation` (`valid`, `val`, `dev`) beside `train` and `test`, it is validated on. Without a labelled
    `test` it is tested on, and training images are held out for validation. A line says so.

    Args:
        path: the data set's name, a folder of files that `load_dataset` reads, or one that `save_to_disk` wrote.
        config: its configuration, if it has several.
        image: the column of images; default: the first.
        label: the column of labels; default: the first of classes, or `label`.
        options: those of StoredImages.

    Raises:
        Missing: datasets is not installed.
        BadInput: the data set can't be loaded, has no such column or split or a sample without a label, or as in
            StoredImages.
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

    def beside(self) -> Path:
        """The folder, or that of downloaded data sets."""
        import datasets

        return Path(self.path) if Path(self.path).is_dir() else Path(datasets.config.HF_DATASETS_CACHE)

    def prepare_data(self) -> None:
        """Download the data set, unless that is done; Lightning calls this in one process of each machine."""
        if not self._splits:
            self._load()

    def read(self) -> tuple[Encoded, ...]:  # type: ignore[override]  # two or three
        """Open the splits without decoding an image."""
        found = self._load()
        image, label = self._columns(found["train"].features)
        numbers = {part: found[part].select_columns([label])[:][label] for part in found}
        names = getattr(found["train"].features[label], "names", None)
        if names is None:
            known = sorted(set(numbers["train"]))
            places = {value: place for place, value in enumerate(known)}
            numbers = {part: [places.get(value, -1) for value in each] for part, each in numbers.items()}
            names = list(map(str, known))
        self.class_names = tuple(names)
        if len(names) < 2:
            raise BadInput("data.label", label, f"at least 2 classes; there are {len(names)}")
        sets = self._parts({part: torch.tensor(each) for part, each in numbers.items()})
        first = Rows(torch.zeros(1), self.image_size, "", (0, 0), self._bytes(found["train"], image), image, "train",
                     np.zeros(1, np.int64))  # fmt: skip
        size = size_of(first.opened(0), self.image_size)
        made = {}
        for part, (split, labels) in sets.items():
            data, rows = self._bytes(found[split], image), np.arange(len(labels))
            made[part] = Rows(labels, self.image_size, "train[0]", size, data, image, split, rows)
        return self.usable(made, Counter(), self.path)

    def _load(self) -> Any:
        """The splits by name."""
        need("datasets", "datasets")
        import datasets

        datasets.disable_progress_bars()
        try:
            saved = (Path(self.path) / "dataset_dict.json").is_file()
            found = datasets.load_from_disk(self.path) if saved else datasets.load_dataset(self.path, self.config)
        except Exception as error:  # whatever a data set's own reader does
            raise BadInput(
                "data.path", self.path, f"a data set of images, by name or folder; {reason(error)}"
            ) from error
        if "train" not in found:
            raise BadInput("data.path", self.path, f"a split train; it has {', '.join(found)}")
        return found

    def _columns(self, features: Any) -> tuple[str, str]:
        """The columns of images and labels."""
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        image = self.image or next((name for name, kind in kinds.items() if kind == "Image"), "image")
        label = self.label or next((name for name, kind in kinds.items() if kind == "ClassLabel"), "label")
        for option, column in (("image", image), ("label", label)):
            if column not in kinds:
                raise BadInput(f"data.{option}", column, f"a column of the data set, one of {', '.join(kinds)}")
        if kinds[image] != "Image":
            raise BadInput("data.image", image, f"a column of images; it is of {kinds[image]}")
        return image, label

    def _parts(self, labels: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
        """For train, test and perhaps validation the split, and its labels."""
        own = next((name for name in VALIDATION if name in labels), None)
        labelled = "test" in labels and bool((labels["test"] >= 0).all())
        parts = {"train": "train", "test": "test"} | ({"validation": own} if own else {})
        if not labelled:
            missing = "has no labels" if "test" in labels else "is not there"
            if own is None:
                raise BadInput("data.path", self.path, f"a split test with labels; it {missing}")
            self.say(f"the split test {missing}: tests on {own}, validates on images held out from train")
            parts = {"train": "train", "test": own}
        for split in parts.values():
            if bool((labels[split] < 0).any()):
                raise BadInput("data.path", self.path, f"a label of the training set's classes for all of {split}")
        return {part: (split, labels[split]) for part, split in parts.items()}

    def _bytes(self, data: Any, image: str) -> Any:
        """The split without decoding."""
        import datasets

        return data.select_columns([image]).cast_column(image, datasets.Image(decode=False))
