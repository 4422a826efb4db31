"""Files of users: regular files, folders read once, and tables in CSV, whatever program wrote them."""

import csv
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from apprentice.errors import BadInput, reason

AGAIN = "folders linked again"  # kinds of what is skipped
NO_FILE = "pipes and devices"
# Names of columns, in any case.
PATHS = ("path", "file", "filename", "file_name", "filepath", "file_path", "image", "image_path")
TEXTS = ("text", "sentence")
LABELS = ("label", "class", "category", "target", "class_name")
DELIMITERS = ",;\t|"
Column = list[str]


def check_file(path: Path, flag: str, expected: str = "a file") -> None:
    """Raise BadInput if a path is there, but no regular file."""
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        raise BadInput(flag, path, f"{expected}; this is {kind}")


def walk(folder: Path, skipped: Counter[str]) -> Iterator[Path]:
    """Yield the files below a folder and behind links, in the order of folders and of names.

    A folder that links lead to several times, as in a loop, is read once. Links that lead nowhere count as files.
    """
    seen = set[tuple[int, int]]()
    for parent, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(parent)  # noqa: PTH116 - of many folders
        place = status.st_dev, status.st_ino
        if place in seen:
            skipped[AGAIN] += 1
            folders.clear()
            continue
        seen.add(place)
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if path.exists() and not path.is_file():
                skipped[NO_FILE] += 1
            else:
                yield path


def read_csv(path: Path, flag: str, expected: str = "a table in CSV and UTF-8") -> dict[str, Column]:
    """Return columns by name, their cells as they are; rows in messages count from 2, as the first line has names.

    What cuts a row is the most frequent of DELIMITERS in the first line; a mark of UTF-8 before it is left out.

    Raises:
        BadInput: the file of the `flag` can't be read, has no rows, two columns of one name, or a row with more or
            fewer values than names.
    """
    check_file(path, flag, expected)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            file.seek(0)
            rows = list(csv.reader(file, delimiter=max(DELIMITERS, key=first.count), strict=True))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(flag, path, f"{expected}; {reason(error)}") from error
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise BadInput(flag, path, "a line of names, and a row for each sample; it has no rows")
    names = [name.strip() for name in rows[0]]
    check_names(names, flag, path)
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(names):
            expected = f"{len(names)} values in each row, as in the first; row {number} has {len(row)}"
            raise BadInput(flag, path, expected)
    return {name: [row[place] for row in rows[1:]] for place, name in enumerate(names)}


def check_names(names: Sequence[str], flag: str, path: Path) -> None:
    """Raise BadInput if two columns of a table have one name."""
    for place, name in enumerate(names):
        if name in names[:place]:
            expected = f"a name of its own for each column; {names.index(name) + 1} and {place + 1} are both {name!r}"
            raise BadInput(flag, path, expected)


def find_column(names: Iterable[str], usual: Sequence[str]) -> str | None:
    """Return the first of the usual names that there is in any case, as it is written; None if there is none."""
    by_case = {name.lower(): name for name in reversed([*names])}
    return next((by_case[name] for name in usual if name in by_case), None)
