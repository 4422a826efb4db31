"""Files written whole or not at all, whether the process is killed, the disk is full or the power fails."""

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
    """Yield a temporary path in the same folder; it replaces `path` when the block succeeds.

    In the folder of an open run the file is recorded as the run's first. If the block fails, `path` stays as it was.
    Each path has one temporary name: two processes must not write one path at a time (a run's folder is locked).

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
    with suppress(OSError):  # some network disks can't sync a folder
        _sync(path.parent)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace the file by these bytes."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Replace the file by this text in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: object) -> None:
    """Replace the file by this value as JSON; NaN and infinities become null.

    Raises:
        TypeError: a part of it is no JSON value.
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
