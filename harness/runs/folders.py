"""A run's folder: refused when it is in use or holds results, locked in a run, which goes on with the same samples."""

import csv
import io
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from datamodules.fingerprints import SAMPLED, changed_parts, touched_parts
from harness.runs import launch
from harness.runs.files import list_recorded, read_text, record_files, remove_recorded, write_bytes, write_text
from harness.runs.quiet import notice
from harness.runs.records import reading

# Files of runs without a record: a folder with one of these is no new one.
RUN_FILES = (
    "config.yaml", "environment.json", "results.*", "report.html", "data.json", "split.csv", "seed[0-9]*/*.json",
    "seed[0-9]*/*.ckpt",
)  # fmt: skip
LOCK = ".lock"
JOB = ".job"  # the torchrun job that opened the folder last
SAMPLES = "data.json"  # the fingerprint of the run's samples
SPLIT = "split.csv"  # the samples of each part
NAMED = 3  # samples in a message


def new_folder(experiment: str, job: str = "") -> Path:
    """Create a folder `runs/<experiment>/<time>`, one for all processes of a call and the restarts of its job."""
    parent = Path("runs") / experiment
    if launch.ranks() > 1:
        with launch.main_first("new folder"):
            if launch.is_main_process():
                launch.store_set("out", _reopen_or_create(parent, job))
        return Path(launch.store_get("out"))
    variable = f"APPRENTICE_OUT_{experiment.upper()}"
    if variable not in os.environ:  # sub-processes that Lightning starts run the script again and read this
        os.environ[variable] = _reopen_or_create(parent, job)
    return Path(os.environ[variable])


def _reopen_or_create(parent: Path, job: str) -> str:
    for path in sorted(parent.glob("*"), reverse=True):
        if _is_restart(path, job):
            return str(path)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    names = (stamp if number == 1 else f"{stamp}_{number}" for number in itertools.count(1))
    try:
        for name in names:
            with suppress(FileExistsError):
                (parent / name).mkdir(parents=True)
                break
    except OSError as error:
        raise BadInput("out", parent, f"a folder that can be written ({error.strerror})") from None
    return str(parent / name)


def _is_restart(out: Path, job: str) -> bool:
    """Return whether this torchrun job opened the folder last. Jobs without --rdzv_id share the id "none" at first."""
    run_id, path = job.partition("\n")[0], out / JOB
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" if run_id == "none" else run_id != ""
    return restarted and path.exists() and path.read_text() == job


@contextmanager
def open_folder(out: Path, resume: bool = False, overwrite: bool = False, job: str = "") -> Iterator[Path]:
    """Create, check and lock the folder; of ranks that have joined, rank zero does so before the others enter.

    A torchrun job (`launch.torchrun_job`) that restarts its ranks resumes in its folder without `resume`.

    Raises:
        BadInput: the folder can't be written or is in use; it holds a run, and neither `resume` nor `overwrite` is set;
            or `overwrite` is set and a file that may be a run's is in no record.
    """
    with ExitStack() as stack:
        with launch.main_first("folder"):
            if launch.is_main_process():
                _check_seeds(out)
                resumes = resume or _is_restart(out, job)
                if not resumes and not (out / LOCK).exists():  # no lock is left in somebody else's folder
                    _check_free(out, overwrite)
                stack.callback(_lock(out).release)
                files = run_files(out) if resume else []
                if files and not (out / "config.yaml").exists():
                    expected = f"config.yaml in {out}, which holds {files[0]} of a run with unknown settings"
                    raise BadInput("resume", "true", expected)
                if resume and not files:
                    sys.stderr.write(f"{out} holds no run to go on with: a new one starts\n")
                if not resumes:
                    _check_free(out, overwrite)
                    remove_recorded(out)
                write_text(out / JOB, job)
        with record_files(out):
            yield out


def _lock(out: Path) -> FileLock:
    lock, pid = FileLock(out / LOCK), out / ".pid"
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=3)  # ranks of a killed run may need a moment to end
        pid.write_text(str(os.getpid()))
    except Timeout:
        owner = pid.read_text() if pid.exists() else "unknown"
        raise BadInput("out", out, f"a folder not in use; process {owner} works in it") from None
    except OSError as error:
        lock.release()
        kind = "a link that leads nowhere" if out.is_symlink() else "a file"
        why = f"this is {kind}" if isinstance(error, FileExistsError) else error.strerror
        raise BadInput("out", out, f"a folder that can be written ({why})") from None
    return lock


def _check_seeds(out: Path) -> None:
    """Raise BadInput if a seed's folder is a file or a link that leads nowhere."""
    for path in out.glob("seed[0-9]*"):
        if path.name.removeprefix("seed").isdecimal() and not path.is_dir():
            kind = "a broken link" if path.is_symlink() else "a file"
            raise BadInput("out", out, f"folders for seeds; {path} is {kind}")


def run_files(out: Path) -> list[str]:
    """Return the names of the files that a run has left in a folder; none in a new one."""
    usual = [path for pattern in RUN_FILES for path in sorted(out.glob(pattern))]
    return list(dict.fromkeys(path.relative_to(out).as_posix() for path in [*list_recorded(out), *usual]))


def _check_free(out: Path, overwrite: bool) -> None:
    """Raise BadInput if the folder holds a run that is not to be overwritten, or a file that no run has recorded."""
    files = run_files(out)
    if files and not overwrite:
        raise BadInput("out", out, f"a new folder, as this one holds {files[0]}; or `resume true`, `overwrite true`")
    recorded = {path.relative_to(out).as_posix() for path in list_recorded(out)}
    if unrecorded := [name for name in files if name not in recorded]:
        rest = f" and {len(unrecorded) - 1} more are" if len(unrecorded) > 1 else " is"
        advice = f"{out / unrecorded[0]}{rest} in no record: delete that by hand, or take another `out`"
        raise BadInput("overwrite", "true", f"a folder whose files a run has recorded; {advice}")


def describe_samples(data: InMemoryData) -> dict[str, Any]:
    """Return the content of data.json."""
    return {"name": data.name, "samples": data.sizes, "fingerprint": data.fingerprint()}


def write_split(out: Path, data: InMemoryData) -> None:
    """Write the part, the name and the class of each sample, if the data module has drawn the test set.

    The classes are true ones, so that the list is a table for other runs; those that are trained on come beside them.
    """
    if rows := data.split_list():
        header, table = ("split", "path", "label", "trained_label")[: len(rows[0])], io.StringIO()
        csv.writer(table, lineterminator="\n").writerows([header, *rows])
        write_bytes(out / SPLIT, table.getvalue().encode(errors="surrogateescape"))


def check_samples(
    out: Path, now: Mapping[str, Any], advice: str = "take another `out`", listed: Sequence[tuple[str, ...]] = ()
) -> None:
    """Raise BadInput, with this advice, if the run in a folder began with other samples than those of `now`.

    `listed` are the part, the name and more of each sample now, by which split.csv tells what came and what went.
    """
    path = out / SAMPLES
    if not path.exists():
        return
    with reading(path, "out", "the record of the run's data"):
        before = json.loads(read_text(path))
        changed, touched = (find(before["fingerprint"], now["fingerprint"]) for find in (changed_parts, touched_parts))
        counts = {part: (before["samples"].get(part), now["samples"].get(part)) for part in changed}
    if changed:
        parts = ", ".join(f"{part} ({_counts(*pair)})" for part, pair in counts.items())
        names = _changed_names(out, listed)
        expected = f"the samples with which the run in {out} began; others are in {parts}{names}: {advice}"
        raise BadInput("data", now["name"], expected)
    if touched:
        same = f"names and sizes are the same, and the content of {SAMPLED} files of each"
        notice(f"{now['name']}: files of {', '.join(touched)} have other times than when the run began; {same}")


def _changed_names(out: Path, listed: Sequence[tuple[str, ...]]) -> str:
    """Say which samples of split.csv are gone and which are new, or that there are the same names in each part."""
    path = out / SPLIT
    if not listed or not path.is_file():
        return ""
    _, *rows = csv.reader(io.StringIO(os.fsdecode(path.read_bytes()), newline=""))
    before, now = ({(row[0], row[1]) for row in entries if len(row) > 1} for entries in (rows, listed))
    changes = {"gone": sorted(before - now), "new": sorted(now - before)}
    said = [
        f"{what} are {', '.join(f'{name} of {part}' for part, name in of_kind[:NAMED])}"
        + f" and {len(of_kind) - NAMED:,} more" * (len(of_kind) > NAMED)
        for what, of_kind in changes.items()
        if of_kind
    ]
    return f"; {'; '.join(said)}" if said else f"; of the names in {SPLIT}, whose content is another"


def _counts(before: Any, now: Any) -> str:
    return f"{before} then, {now} now" if before != now else f"{now} then and now"
