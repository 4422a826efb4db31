"""Files of users, as they are on a disk: no pipe or device, which may never end, and no folder twice."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from apprentice.errors import BadInput

AGAIN = "folders linked again"  # kinds of what is skipped
NO_FILE = "pipes and devices"


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
