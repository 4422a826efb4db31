"""Files that are either the old or the new, never half of it: after a kill, a full disk or a power cut."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from harness.runs import manifest


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; what was written there replaces `path` when the block ends well.

    In the folder of the run that is open, the file is recorded as the run's first.

    If the block fails, `path` stays as it was and the temporary file is removed. There is one temporary name for each
    path, so that a killed process leaves at most one behind and the next write reuses it; two processes must not write
    one path at a time (a run's folder is locked).

    Raises:
        OSError: the folder is missing or can't be written, or the disk is full.
    """
    path = Path(path)
    manifest.record(path)
    temporary = manifest.temporary(path)
    try:
        yield temporary
        _sync(temporary)  # else a power cut may leave the new name on an empty file
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # the file is in place; not every network disk can sync a folder
        _sync(path.parent)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace the file by these bytes, all or nothing."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Replace the file by this text in UTF-8, all or nothing."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: object) -> None:
    """Replace the file by this value, all or nothing; NaN and infinities, which JSON does not have, become null.

    Raises:
        TypeError: something in it is no JSON value.
    """
    write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
