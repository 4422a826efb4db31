"""Data sets of Hugging Face, by name or folder: which configuration and which splits are read."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput, reason
from apprentice.extras import Missing, need
from datamodules.text.conversations import NamedRow
from datamodules.text.turns import without_nulls

# A word or an owner's and one, perhaps followed by a configuration, and this by a split to train on.
SET_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(:[\w.-]*){0,2}")
TRAIN, TEST = "train", "test"
USUAL = TRAIN, "train_sft"  # splits to train on, where several could be


@dataclass(frozen=True)
class SplitOfSet:
    """A split of a data set of Hugging Face, mapped by the package `datasets`."""

    data: Any  # datasets.Dataset
    path: str
    split: str
    flag: str = "data.path"
    others: tuple[str, ...] = ()  # splits that are not read

    @property
    def folder(self) -> Path:
        import datasets

        return Path(self.path).absolute() if Path(self.path).is_dir() else Path(datasets.config.HF_DATASETS_CACHE)

    def key(self) -> str:
        return str(self.data._fingerprint)

    def rows(self) -> Iterator[NamedRow]:
        for number, row in enumerate(self.data, 1):
            yield f"{self.split} row {number}", {name: without_nulls(value) for name, value in row.items()}

    def __str__(self) -> str:
        others = f", not {', '.join(self.others)}" if self.others else ""
        return f"{self.path} ({self.split}{others})"


def open_set(path: str, flag: str, formats: str = "JSON lines or Parquet") -> Iterator[SplitOfSet]:
    """Yield the split to train on and, if there is one, that to test on: `test_sft` beside `train_sft`, else `test`.

    `NAME:CONFIGURATION:SPLIT` chooses among several. Without a split it is `train`, `train_sft`, or the only one whose
    name begins so; a folder that `Dataset.save_to_disk` wrote is one split.

    Raises:
        Missing: the package `datasets` is not installed.
        BadInput: there is no such set or split, or there are several.
    """
    folder = path if Path(path).is_dir() else None
    name, configuration, split = (path, "", "") if folder else (*path.split(":"), "", "")[:3]
    try:
        need("datasets", "datasets")
    except Missing as missing:
        if folder:
            raise
        expected = f"a file of {formats}, and there is none; or a data set of Hugging Face, by {missing}"
        raise BadInput(flag, path, expected) from None
    splits = _load(name, configuration or None, path, flag, formats)
    train = split or _choose(list(splits), path, flag)
    if train not in splits:
        raise BadInput(flag, path, f"one of its splits {', '.join(splits)}; {train} is none")
    tests = train.replace(TRAIN, TEST, 1), TEST
    read = [train, *[split for split in tests if split in splits and split != train][:1]]
    others = tuple(split for split in splits if split not in read)
    for split in read:
        yield SplitOfSet(splits[split], name, split, flag, others if split == train else ())


def _load(name: str, configuration: str | None, path: str, flag: str, formats: str) -> dict[str, Any]:
    """Return a data set's splits by name."""
    import datasets

    datasets.disable_progress_bars()
    try:
        saved = any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
        splits = datasets.load_from_disk(name) if saved else datasets.load_dataset(name, configuration)
    except Exception as error:  # noqa: BLE001 - whatever a data set's own reader does
        expected = f"a file of {formats}, or a data set of Hugging Face; {reason(error)}"
        raise BadInput(flag, path, expected) from None
    return dict(splits) if isinstance(splits, dict) else {TRAIN: splits}


def _choose(splits: list[str], path: str, flag: str) -> str:
    """Return the name of the split to train on."""
    training = [name for name in splits if name.startswith(TRAIN)]
    if usual := next((name for name in USUAL if name in training), None):
        return usual
    if len(training) != 1:
        expected = f"{path}::SPLIT, one of {', '.join(training)}" if training else "a split train"
        raise BadInput(flag, path, f"{expected}; it has {', '.join(splits)}")
    return training[0]
