"""Atomic writes of files; those of a run are recorded first, and `overwrite true` deletes recorded files only."""

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput

UNWRITTEN = "no space left on the disk, or it can't be written"
RECORD = ".files"
UNFINISHED = ".unfinished-"  # begins the name of a folder whose files are not checked yet
RUN = "APPRENTICE_RUN"  # the open run's folder, in the environment: processes that the run starts write files too
PART = "APPRENTICE_RUN_PART"  # ends the name of a job's own record: on a network disk two machines can't add to one


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path in the same folder; it replaces `path` when the block succeeds.

    In the folder of an open run the file is recorded as the run's first. If the block fails, the process is killed or
    the power fails, `path` stays as it was. Two processes must not write one path at a time (a run's folder is locked).

    Raises:
        OSError: the folder is missing or can't be written, or the disk is full.
    """
    path = Path(path)
    record(path)
    temporary = _temporary(path)
    try:
        yield temporary
        _sync(temporary)  # else a power cut may leave the new name on an empty file
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a write
            error.filename = str(path)
        if isinstance(error, RuntimeError) and "inline_container" in str(error):  # of torch.save
            raise OSError(errno.EIO, UNWRITTEN, str(path)) from error
        raise
    with suppress(OSError):  # some network disks can't sync a folder
        _sync(path.parent)


def can_be_written(folder: Path) -> bool:
    """Return whether files can be written into a folder, or into a new one of this name, by writing one."""
    places = (folder.absolute(), *folder.absolute().parents)
    try:
        nearest = next(place for place in places if place.exists() or place.is_symlink())
        tempfile.TemporaryFile(dir=nearest).close()  # permissions do not say it of /proc, nor of root
    except OSError:
        return False
    return True


def check_output(path: Path, begins: str, kind: str) -> None:
    """Raise BadInput of `out` if a file can't be written, or is there and not of the command's own kind.

    Files of the kind begin with these characters, and `kind` names them in the message.
    """
    if not can_be_written(path.parent):
        raise BadInput("out", path, "a file in a folder that can be written")
    if path.is_dir():
        raise BadInput("out", path, "a file; this is a folder")
    if path.is_symlink() or (path.exists() and not _begins(path, begins)):
        raise BadInput("out", path, f"a new file, or {kind}, which is replaced; this is another")


def _begins(path: Path, text: str) -> bool:
    if not path.is_file():  # a device, or a pipe, which would wait for its writer
        return False
    with path.open("rb") as file:
        return file.read(len(text.encode())) == text.encode()


def read_text(path: str | Path) -> str:
    """Read a regular file as UTF-8; raise OSError or ValueError if it can't be."""
    if Path(path).exists() and not Path(path).is_file():  # reading a pipe would wait for its writer
        raise OSError(errno.EINVAL, "Not a file", str(path))
    return Path(path).read_text("utf-8")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace the file by these bytes."""
    with atomic(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Replace the file by this text in UTF-8."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: object) -> None:
    """Replace the file by this value as JSON; NaN and infinities become null, TypeError for what JSON can't hold."""
    write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    return [_finite(entry) for entry in value] if isinstance(value, list | tuple) else value


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder in `out`; when the block succeeds, its files replace those of `out`, each at once.

    What a killed process has left in `out` is removed.
    """
    out.mkdir(parents=True, exist_ok=True)
    for left in out.glob(f"{UNFINISHED}*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=out, prefix=UNFINISHED) as temporary:
        yield Path(temporary)
        for path in sorted(Path(temporary).iterdir()):
            with atomic(out / path.name) as target:
                shutil.move(path, target)


@contextmanager
def record_files(out: Path, part: str = "") -> Iterator[None]:
    """Inside, `record` records the files of this folder; a job of the run does in a `part` of its record."""
    os.environ[RUN], os.environ[PART] = str(out.absolute()), part and f".{part}"
    try:
        yield
    finally:
        del os.environ[RUN], os.environ[PART]


def record(path: str | Path) -> None:
    """Record a file of the open run before it is written; others, and those that are not checked yet, are ignored."""
    run = os.environ.get(RUN)
    if any(part.startswith(UNFINISHED) for part in Path(path).parts):
        return  # `atomic_folder` records the names that they get
    if run is None or not Path(path).absolute().is_relative_to(run) or is_recorded(path):
        return
    with Path(run, f"{RECORD}{os.environ.get(PART, '')}").open("a", encoding="utf-8") as file:
        name = Path(path).absolute().relative_to(run).as_posix()
        file.write(f"\n{json.dumps(name)}")  # a line that a killed process left unfinished stays apart
        file.flush()
        os.fsync(file.fileno())


def is_recorded(path: str | Path) -> bool:
    """Return whether the open run has recorded a file."""
    run = os.environ.get(RUN)
    return run is not None and Path(path).absolute() in {Path(run, name) for name in _names(Path(run))}


def list_recorded(out: Path) -> list[Path]:
    """Return the recorded files that exist."""
    return [path for name in _names(out) if (path := out / name).is_file()]


def remove_recorded(out: Path) -> None:
    """Delete the recorded files, temporary files of killed processes, and folders that become empty."""
    names = _names(out)
    for path in (out / name for name in names):
        for file in (path, _temporary(path)):
            if file.is_file():
                file.unlink()
    for folder in sorted({folder for name in names for folder in Path(name).parents[:-1]}, reverse=True):
        with suppress(OSError):
            (out / folder).rmdir()
    for path in out.glob(f"{RECORD}*"):
        path.unlink()


def _names(out: Path) -> list[str]:
    """Read the recorded names; ignore damaged lines and paths out of the folder."""
    names = []
    for path in sorted(out.glob(f"{RECORD}*")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with suppress(ValueError, RecursionError):
                names.append(json.loads(line))
    names = [name for name in names if isinstance(name, str) and ".." not in Path(name).parts]
    return [name for name in names if not Path(name).is_absolute()]
