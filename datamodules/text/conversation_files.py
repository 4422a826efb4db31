"""Where rows of texts come from: files of JSON, Parquet or CSV, and data sets of Hugging Face."""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from apprentice.errors import BadInput, reason
from apprentice.extras import need
from datamodules.files import check_file, check_names, read_csv
from datamodules.text.conversations import NamedRow
from datamodules.text.hub_sets import SET_NAME, SplitOfSet, open_set
from datamodules.text.python_help import PythonHelp
from datamodules.text.token_files import hash_file
from datamodules.text.turns import without_nulls

OTHERS = (".txt", ".csv", ".tsv", ".gz", ".zip", ".zst", ".xz")  # of names that are a file's, whatever is in it
ARRAY = ".json"  # of lines, or of one array
LINES, PARQUET, TABLES = (".jsonl", ".ndjson", ARRAY), ".parquet", (".csv", ".tsv")
ROWS_AT_ONCE = 1024  # of a Parquet file


@dataclass(frozen=True)
class File:
    """A file of JSON lines, Parquet or CSV, read row by row, or of one JSON array."""

    path: Path
    flag: str = "data.path"  # that chooses it

    @property
    def folder(self) -> Path:
        return self.path.absolute().parent

    def key(self) -> str:
        """Return what determines the rows."""
        return hash_file(self.path)

    def rows(self) -> Iterator[NamedRow]:
        """Read the rows; BadInput if the file can't be read, or names the line that is no JSON object in UTF-8."""
        readers = {PARQUET: _parquet_rows, **dict.fromkeys(TABLES, _csv_rows)}
        try:
            read = readers.get(self.path.suffix) or (_array_rows if _is_array(self.path) else _json_rows)
            yield from read(self)
        except OSError as error:
            raise BadInput(self.flag, self.path, f"a file that can be read ({reason(error)})") from None

    def __str__(self) -> str:
        return str(self.path)


Source = File | SplitOfSet | PythonHelp


class Wanted(NamedTuple):
    """What is read: its word in messages, the endings of its files, and what reads other ones."""

    what: str
    endings: Sequence[str] = (*LINES, PARQUET)
    formats: str = "JSON lines or Parquet"
    hint: str = ""


CONVERSATIONS = Wanted("conversations", hint="; `data Text` reads plain text")


def open_sources(path: str | None, test_path: str | None, wanted: Wanted = CONVERSATIONS) -> list[Source]:
    """Return the sources of rows to train on and, if there are such, to test on.

    Without a path they are Python's documentation. A path is a file by its ending, or else a data set of Hugging Face
    by folder or name: see `open_set`.

    Raises:
        Missing: Parquet and data sets need the extra `datasets`.
        BadInput: there is no such file or data set, or no split to train on.
    """
    training: list[Source] = [PythonHelp()] if path is None else _open(path, wanted)
    if test_path is None:
        return training
    *_, test = _open(test_path, wanted, "data.test_path")
    return [training[0], test]


def _open(path: str, wanted: Wanted, flag: str = "data.path") -> list[Source]:
    file = Path(path).expanduser()
    known, named = wanted.endings, f"a file with {wanted.what}"
    if not file.exists() and file.suffix in known:
        raise BadInput(flag, path, f"{named}; it is not there")
    if not file.exists() and (file.suffix in OTHERS or not SET_NAME.fullmatch(path)):
        raise BadInput(flag, path, f"{named}, or a data set of Hugging Face; there is none")
    if file.suffix in known or not file.is_dir():
        check_file(file, flag, named)
    if file.suffix in known:
        if file.suffix == PARQUET:
            need("datasets", "pyarrow.parquet")
        return [File(file, flag)]
    if file.is_file():
        expected = f"a file of {wanted.formats}, whose name ends in {', '.join(known)}{wanted.hint}"
        raise BadInput(flag, path, expected)
    return [*open_set(str(file) if file.is_dir() else path, flag, wanted.formats)]


def _parquet_rows(source: File) -> Iterator[NamedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            number = 0
            check_names(file.schema_arrow.names, source.flag, source.path)
            for batch in file.iter_batches(ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", {name: without_nulls(value) for name, value in row.items()}
    except pyarrow.ArrowException as error:
        raise BadInput(source.flag, source.path, f"a file of Parquet; it says: {reason(error)}") from None


def _csv_rows(source: File) -> Iterator[NamedRow]:
    columns = read_csv(source.path, source.flag)
    for number, values in enumerate(zip(*columns.values(), strict=True), 2):
        yield f"row {number}", dict(zip(columns, values, strict=True))


def _json_rows(source: File) -> Iterator[NamedRow]:
    with source.path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _json_object(source, number, line)


def _is_array(path: Path) -> bool:
    """Return whether a file's first character that is no space opens an array of JSON, and its name allows one."""
    if path.suffix != ARRAY:
        return False
    with path.open("rb") as file:
        return next((line.removeprefix(codecs.BOM_UTF8).lstrip()[:1] for line in file if line.strip()), b"") == b"["


def _array_rows(source: File) -> Iterator[NamedRow]:
    try:
        rows = json.loads(source.path.read_text("utf-8-sig"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError, too
        raise BadInput(source.flag, source, f"an array of JSON objects; it is none: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise BadInput(source.flag, source, f"an array of JSON objects; item {number} is a {type(row).__name__}")
        yield f"item {number}", row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; ValueError if it has a key twice."""
    whole = dict(pairs)
    if len(whole) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"it has {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return whole


def _json_object(source: File, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise BadInput(source.flag, source, f"JSON lines in UTF-8; line {number} is not") from None
    except RecursionError:
        raise BadInput(source.flag, source, f"a JSON object in each line; line {number} is nested too deep") from None
    except ValueError as error:
        raise BadInput(source.flag, source, f"a JSON object in each line; line {number} is none: {error}") from None
    if not isinstance(row, dict):
        raise BadInput(source.flag, source, f"a JSON object in each line; line {number} is a {type(row).__name__}")
    return row
