"""A file of a teacher's outputs, by samples: what it holds, and how its entries and a data set's samples are matched.

An npz has arrays, a Parquet file columns, of n entries:

    logits             (n, C); or `probabilities`, of which logits are the logarithms; or values, embeddings, scores
    row, file_name or text  (n,): what names an entry's sample; without one, entry i is of row i
    part               (n,) train, validation or test, where rows are of sets that are stored apart; default: train
    classes            (C,) names of the logits' classes, where the file has them; in Parquet as metadata, a JSON list

A row is a sample's place in the set as it was read, before parts were drawn from it.
"""

import copy
import json
import zipfile
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from apprentice.errors import BadInput, reason
from lit_modules.nets.classes import class_order
from lit_modules.nets.outputs import CLASSES, EMBEDDINGS, LABELS, SCORES, UNLABELLED, VALUES
from lit_modules.nets.outputs import Outputs as NetOutputs
from lit_modules.nets.stored import TeacherInFile

FLAG = "teacher.file"
PROBABILITIES, CLASS_NAMES, PART, TEXT = "probabilities", "classes", "part", "text"
# Names of the outputs, by what the task's nets give.
NAMES = {
    CLASSES: ("logits", PROBABILITIES, SCORES),
    LABELS: ("logits", PROBABILITIES, SCORES),
    VALUES: ("values", SCORES),
    EMBEDDINGS: ("embeddings",),
    SCORES: ("embeddings",),  # of the texts of a row, whose products are scores
}
KEYS = "row", "file_name", TEXT
PARTS = "train", "validation", "test"
LEAST = 1e-7  # a probability that stands for 0, whose logarithm no loss takes
LISTED = 2  # samples in a message


class Outputs(TeacherInFile):
    """A teacher whose outputs for a data set's samples are in a file of the user's.

    It may be behind an API, in ONNX or of scikit-learn. It is not asked: outputs are found by a sample's place in its
    set, so the samples that train have to be the same in each epoch, and all of them in the file.

    Attributes:
        parts: outputs (n, C), of rows of k texts (n, k, D), of the samples of `train`, `validation` and `test` by these
            names, in their order; a part of which the file lacks samples is left out. Known after `of_data`.
        note: what a user may want to know of the classes; "" for nothing.

    Args:
        file: npz or Parquet.
    """

    feature_layer = ""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.parts, self.note = file, dict[str, Tensor](), ""
        self.output = nn.Identity()  # a layer, for objectives that relate samples by the teacher's embeddings

    def of_data(self, data: Any, kind: str, wanted: Collection[str] = ("train",)) -> "Outputs":
        """Return a copy with the outputs for the samples of a data module, whose nets give outputs of this kind.

        Raises:
            BadInput: training changes the samples, or the file can't be read or lacks a sample of a wanted part.
        """
        bound = copy.copy(self)
        bound.parts, bound.note = outputs_of(Path(self.file).expanduser(), data, kind, wanted)
        bound.pooled_layer = "output" if kind in UNLABELLED else ""
        bound.width = bound.parts["train"].shape[-1]
        bound.is_comparable = "test" in bound.parts
        return bound

    def part(self, name: str) -> Tensor:
        """Return the outputs (n, ..., C) of a part; BadInput before `of_data`."""
        if not self.parts:
            raise BadInput("teacher", "Outputs", "the outputs of a data set's samples, found by `of_data`")
        return self.parts[name]

    def rows(self, part: str, index: Tensor, layers: Collection[str] = ()) -> NetOutputs:
        """Return the outputs (b, C) of a part's samples at these places (b,), and as features of these layers."""
        return self._as_outputs(self.part(part)[index.cpu()].to(index.device), layers)

    def zeros(self, inputs: Tensor, layers: Collection[str] = ()) -> NetOutputs:
        """Return zeros in the place of outputs for inputs (b, ...), for checks of shapes."""
        like = self.part("train")
        return self._as_outputs(like.new_zeros(len(inputs), *like.shape[1:]).to(inputs.device), layers)

    def _as_outputs(self, outputs: Tensor, layers: Collection[str]) -> NetOutputs:
        return NetOutputs(outputs, dict.fromkeys(layers, outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        raise BadInput("teacher", "Outputs", f"a net with weights; of this one there are outputs alone, in {self.file}")


class OutputFile(NamedTuple):
    """What a file holds."""

    arrays: Mapping[str, np.ndarray]
    classes: tuple[str, ...]  # names of the logits' classes; () if it has none


def outputs_of(path: Path, data: Any, kind: str, wanted: Collection[str]) -> tuple[dict[str, Tensor], str]:
    """Return the outputs (n, C), or (n, k, D), for each part of a data module of which a file has all samples.

    Return also a note on the classes for the user, "" for none.

    `kind` is what nets give for such data, and `wanted` are parts that the file has to have.

    Raises:
        BadInput: the file can't be read, has no such outputs, other classes, a value that is not finite or an entry
            twice, or lacks a sample that is wanted; or the samples of training are not the same in each epoch.
    """
    if kind == CLASSES and data.label_shape:
        raise BadInput("teacher", "Outputs", f"not allowed with `data {data.name}`: nets have an output for each token")
    if data.train_inputs_change:
        how = "`data.augment false`, and no transforms, mixup or cutmix"
        raise BadInput(
            FLAG, path, f"training samples that are the same in each epoch, as the file's outputs are: {how}"
        )
    file = read_file(path)
    outputs, note = _outputs(path, file, kind, data)
    by = next((name for name in KEYS if name in file.arrays), "row")
    if kind == SCORES and by != TEXT:
        raise BadInput(FLAG, path, f"a `{TEXT}` for each entry, as a row of `data {data.name}` has several")
    entries = _entries(path, file, by, len(outputs), data)
    places = {part: [entries.get(key) for key in _keys(path, data, part, by)] for part in PARTS if data.sizes[part]}
    for part in PARTS:
        missing = [number for number, place in enumerate(places.get(part, [])) if place is None]
        if missing and part in wanted:
            keys = [key[1] for key in _keys(path, data, part, by)]
            listed = ", ".join(str(keys[number]) for number in missing[:LISTED])
            more = f" and {len(missing) - LISTED:,} more" if len(missing) > LISTED else ""
            expected = f"an entry for each {part} sample; none is for the {by} {listed}{more}"
            raise BadInput(FLAG, path, expected)
    whole = {part: torch.tensor(of_part) for part, of_part in places.items() if None not in of_part}
    shape = data.label_shape if kind == SCORES else ()
    return {part: outputs[of_part.view(-1, *shape)] for part, of_part in whole.items()}, note


def _outputs(path: Path, file: OutputFile, kind: str, data: Any) -> tuple[Tensor, str]:
    """Return a file's outputs (m, C) in the data's order of classes, and a note on that."""
    names = [name for name in NAMES[kind] if name in file.arrays]
    if len(names) != 1:
        has = ", ".join(file.arrays) or "nothing"
        raise BadInput(FLAG, path, f"one of {', '.join(NAMES[kind])} (n, C), as nets give {kind} here; it has {has}")
    name = names[0]
    values = file.arrays[name]
    if values.dtype.kind not in "fiu":
        raise BadInput(FLAG, path, f"{name} that are numbers, (n, C); they are {values.dtype}")
    values = values[:, None] if values.ndim == 1 and kind == VALUES else values
    width = None if kind in UNLABELLED else data.num_classes
    if values.ndim != 2 or width not in {None, values.shape[1]}:
        raise BadInput(FLAG, path, f"{name} (n, {width or 'D'}), as the data has it; they are {values.shape}")
    outputs = torch.from_numpy(values.astype(np.float64 if values.dtype == np.float64 else np.float32))
    if faults := (~outputs.isfinite().all(1)).nonzero().flatten().tolist():
        raise BadInput(FLAG, path, f"finite {name}; entry {faults[0]} has another, and {len(faults)} have in all")
    if kind == VALUES:  # which are in the data's unit, and those of nets standardised
        mean, std = data.label_scale
        outputs = ((outputs.double() - mean) / std).to(outputs.dtype)
    if name == PROBABILITIES:
        outputs = _logits_of(path, outputs, kind)
    if kind not in {CLASSES, LABELS} or not file.classes:
        return outputs, ""
    order = class_order(file.classes, tuple(data.class_names), FLAG, path)
    note = order.note or ("its outputs are put into the order of the data's classes" if order.moves else "")
    return outputs[:, order.places], note


def _logits_of(path: Path, probabilities: Tensor, kind: str) -> Tensor:
    """Return logits of probabilities: of classes their logarithms, of labels those of the odds."""
    sums = probabilities.sum(1)
    if probabilities.min() < 0 or probabilities.max() > 1 or (kind == CLASSES and (sums - 1).abs().max() > 1e-3):
        raise BadInput(FLAG, path, "probabilities from 0 to 1" + ", of which each row adds up to 1" * (kind == CLASSES))
    bounded = probabilities.clamp(LEAST, 1.0 if kind == CLASSES else 1 - LEAST)
    return bounded.log() if kind == CLASSES else bounded.log() - (1 - bounded).log()


def _entries(path: Path, file: OutputFile, by: str, count: int, data: Any) -> dict[Hashable, int]:
    """Return the places of the entries by what names their samples; BadInput for one that is there twice."""
    names = [*range(count)] if by not in file.arrays else file.arrays[by].tolist()
    parts = file.arrays[PART].tolist() if PART in file.arrays else ["train"] * count
    if len(names) != count or len(parts) != count:
        lengths = f"{count:,} outputs, {len(names):,} names and {len(parts):,} parts"
        raise BadInput(FLAG, path, f"as many names of samples, by {by}, as outputs; it has {lengths}")
    if by == "row" and not all(isinstance(name, int) for name in names):
        raise BadInput(FLAG, path, f"rows that are whole numbers; the first is {names[0]}")
    if unknown := [part for part in parts if part not in PARTS]:
        raise BadInput(FLAG, path, f"parts that are {', '.join(PARTS)}; one is {unknown[0]}")
    entries = dict[Hashable, int]()
    for place, (name, part) in enumerate(zip(names, parts, strict=True)):
        key = (data.source_of(part) if by == "row" else "", name)
        if key in entries:
            raise BadInput(
                FLAG, path, f"an entry for each sample once; {by} {name} is in entries {entries[key]} and {place}"
            )
        entries[key] = place
    return entries


def _keys(path: Path, data: Any, part: str, by: str) -> list[tuple[str, Any]]:
    """Return what names the samples of a part in a file, or the texts of each of its rows, one after the other.

    BadInput for data whose samples have no such names.
    """
    if by == "row":
        source = data.source_of(part)
        return [(source, row) for row in data.rows_of(part).tolist()]
    names: Sequence[str] | None = data.names_of(part, by)
    if names is None:
        raise BadInput(FLAG, path, f"samples named by row; those of {data.name} have no {by}")
    return [("", name) for name in names]


def read_file(path: Path) -> OutputFile:
    """Read a file; BadInput if it is not there, or is damaged."""
    try:
        status = path.stat()
        return _read(path, status.st_size, status.st_mtime_ns)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(FLAG, path, f"an npz or a Parquet file of a teacher's outputs ({reason(error)})") from None


@lru_cache(maxsize=2)  # each seed, and each check, makes a teacher
def _read(path: Path, _size: int, _changed: int) -> OutputFile:
    if path.suffix == ".parquet":
        return _read_parquet(path)
    with np.load(path, allow_pickle=False) as content:
        arrays = {name: content[name] for name in content.files}
    return OutputFile(arrays, tuple(map(str, arrays.pop(CLASS_NAMES, np.array([])).tolist())))


def _read_parquet(path: Path) -> OutputFile:
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise BadInput(FLAG, path, f"a Parquet file of a teacher's outputs ({reason(error)})") from None
    classes = json.loads((table.schema.metadata or {}).get(CLASS_NAMES.encode(), b"[]"))
    return OutputFile({name: _column(table[name], path, name) for name in table.column_names}, tuple(map(str, classes)))


def _column(column: Any, path: Path, name: str) -> np.ndarray:
    """Return a column as an array, (n,), or (n, C) of lists; BadInput for lists of several lengths."""
    if not str(column.type).startswith(("list", "large_list", "fixed_size_list")):
        return np.asarray(column.to_numpy())
    rows = column.to_pylist()
    if len({*map(len, rows)}) > 1:
        raise BadInput(
            FLAG, path, f"{name} of one width; rows have {min(map(len, rows))} to {max(map(len, rows))} values"
        )
    return np.array(rows, np.float64 if "double" in str(column.type) else np.float32)
