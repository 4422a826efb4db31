"""The record of the files that a run writes into its folder: `--overwrite true` deletes these and no others."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = ".files"
RUN = "APPRENTICE_RUN"  # the open run's folder, in the environment: processes that the run starts write files too


@contextmanager
def recording(out: Path) -> Iterator[None]:
    """Let `record` record files of this folder inside the block."""
    os.environ[RUN] = str(out.absolute())
    try:
        yield
    finally:
        del os.environ[RUN]


def record(path: str | Path) -> None:
    """Record a file as the open run's before it is written; files outside its folder are not recorded."""
    run = os.environ.get(RUN)
    if run is None or not Path(path).absolute().is_relative_to(run) or is_recorded(path):
        return
    with Path(run, NAME).open("a", encoding="utf-8") as file:
        name = Path(path).absolute().relative_to(run).as_posix()
        file.write(f"\n{json.dumps(name)}")  # a line that a killed process has not finished stays by itself
        file.flush()
        os.fsync(file.fileno())


def is_recorded(path: str | Path) -> bool:
    """Whether the open run has recorded this file."""
    run = os.environ.get(RUN)
    return run is not None and Path(path).absolute() in {Path(run, name) for name in _names(Path(run))}


def recorded(out: Path) -> list[Path]:
    """The recorded files that exist."""
    return [path for name in _names(out) if (path := out / name).is_file()]


def remove(out: Path) -> None:
    """Delete the recorded files, temporary files of killed processes, and folders that are empty then."""
    names = _names(out)
    for name in names:
        for path in (out / name, temporary(out / name)):
            if path.is_file():
                path.unlink()
    folders = {folder for name in names for folder in (out / name).relative_to(out).parents[:-1]}
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):
            (out / folder).rmdir()
    (out / NAME).unlink(missing_ok=True)


def temporary(path: Path) -> Path:
    """Where a file is written before it replaces the old one."""
    return path.with_name(f".{path.name}.tmp")


def _names(out: Path) -> list[str]:
    """The recorded names; a damaged line or a path out of the folder is ignored."""
    path, names = out / NAME, []
    for line in path.read_text("utf-8", errors="replace").splitlines() if path.exists() else ():
        with suppress(ValueError):
            names.append(json.loads(line))
    names = [name for name in names if isinstance(name, str) and ".." not in Path(name).parts]
    return [name for name in names if not Path(name).is_absolute()]
