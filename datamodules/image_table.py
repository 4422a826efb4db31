"""Images that a table names, a row each: CSV or TSV with columns of paths and labels."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apprentice.errors import BadInput
from datamodules.files import LABELS, PATHS, Column, find_column, read_csv
from datamodules.image_sources import ImageFiles, ImageSource
from datamodules.stored_images import StoredImages

SPLIT = "split"  # the name of a column, in any case, and names of the parts in it
PARTS = {
    "train": "train", "training": "train", "val": "validation", "valid": "validation", "validation": "validation",
    "dev": "validation", "test": "test", "testing": "test",
}  # fmt: skip


class ImageTable(StoredImages):
    """Images that a table names, as RGB; decodes only the chosen subset.

    A CSV file has a first line of names and is UTF-8, with or without a mark of it; what cuts it is the most frequent
    of `,` `;` tab and `|` in that line. With a column `split` of train, test and perhaps val (validation), these are
    the parts; without, or without rows of test, images are drawn by class for testing and validation (`test_size`,
    `validation_size`). A line says so. Classes are in the order of their names, or of their numbers.

    Args:
        root: the table.
        folder: where its paths begin; default: the table's folder.
        image: the column of paths; default: `path`, `file_name` and the like.
        label: the column of labels; default: `label`, `class` and the like.
        split: the column of parts; default: `split`, if there is one.
        options: those of StoredImages.

    Raises:
        BadInput: the table can't be read, lacks a column, has a row without a path or a label, the same path twice, or
            a part of another name; a file is not there.
    """

    def __init__(
        self,
        root: str | Path,
        image_size: int | None = None,
        *,
        folder: str | Path | None = None,
        image: str | None = None,
        label: str | None = None,
        split: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(image_size, **options)
        self.root = Path(root).expanduser()
        self.folder = self.root.parent if folder is None else Path(folder).expanduser()
        self.image, self.label, self.part = image, label, split

    def images_folder(self) -> Path:
        return self.folder

    def read(self) -> tuple[ImageSource, ...]:
        columns = read_csv(self.root, "data.root")
        columns = {name: [cell.strip() for cell in column] for name, column in columns.items()}
        paths = self._column(columns, "image", self.image, PATHS)
        labels = self._column(columns, "label", self.label, LABELS)
        self._check_rows(paths, labels)
        names = {*labels}
        numeric = all(name.isascii() and name.removeprefix("-").isdecimal() for name in names)
        self.class_names = tuple(sorted(names, key=int if numeric else None))
        if len(self.class_names) < 2:
            raise BadInput("data.root", self.root, f"at least 2 classes; there is one, {self.class_names[0]}")
        parts = self._parts(columns, len(paths))
        numbers = {name: number for number, name in enumerate(self.class_names)}
        sets = {}
        for part in ("train", "test", "validation"):
            rows = [row for row, of_row in enumerate(parts) if of_row == part]
            if rows:
                files = np.array([os.fsencode(paths[row]) for row in rows])
                of_rows = torch.tensor([numbers[labels[row]] for row in rows])
                sets[part] = ImageFiles(of_rows, self.image_size, self.folder, files)
        return self.prepare_sets(self._with_test(sets), Counter(), self.root)

    def _with_test(self, sets: dict[str, ImageFiles]) -> dict[str, ImageFiles]:
        """Return the sets of train, test and validation; without test, validation takes its place, as in a folder."""
        if "train" not in sets:
            raise BadInput("data.split", self.part or SPLIT, "rows of train; there are none")
        lacking = [name for number, name in enumerate(self.class_names) if not (sets["train"].labels == number).any()]
        if lacking:
            raise BadInput("data.root", self.root, f"rows of train for each class; there are none of {lacking[0]}")
        if "test" in sets or "validation" not in sets:
            return sets
        self.say("no row is of test: tests on rows of validation, validates on images held out from train")
        return {"train": sets["train"], "test": sets["validation"]}

    def _column(self, columns: dict[str, Column], flag: str, chosen: str | None, usual: Sequence[str]) -> Column:
        name = find_column(columns, usual) if chosen is None else chosen
        if name not in columns:
            listed = f"a column of {self.root}, one of {', '.join(columns)}"
            raise BadInput(f"data.{flag}", name or f"{usual[0]}, {usual[1]}, …", listed)
        return columns[name]

    def _check_rows(self, paths: Column, labels: Column) -> None:
        rows: dict[str, int] = {}
        missing = []
        for number, (path, label) in enumerate(zip(paths, labels, strict=True), 2):
            for value, what in ((path, "path"), (label, "label")):
                if not value:
                    raise BadInput(
                        "data.root", self.root, f"a path and a label in each row; row {number} has no {what}"
                    )
            if rows.setdefault(path, number) != number:
                raise BadInput("data.root", self.root, f"each path once; rows {rows[path]} and {number} have {path}")
            if self.on_error == "stop" and not (self.folder / path).is_file():
                missing.append((number, path))
        if missing:
            more = f", nor {len(missing) - 1:,} more" if len(missing) > 1 else ""
            file = f"that of row {missing[0][0]}, {missing[0][1]}, is not{more}"
            raise BadInput("data.root", self.root, f"files below {self.folder} (`data.folder`); {file}")

    def _parts(self, columns: dict[str, Column], count: int) -> list[str]:
        """Return the part of each row; train if there is no column of parts."""
        if self.part is None and SPLIT not in {name.lower() for name in columns}:
            return ["train"] * count
        names = self._column(columns, "split", self.part, [SPLIT, "parts"])
        for number, name in enumerate(names, 2):
            if name.lower() not in PARTS:
                expected = f"train, val or test in each row of `data.split`; row {number} has {name or 'nothing'}"
                raise BadInput("data.root", self.root, expected)
        return [PARTS[name.lower()] for name in names]
