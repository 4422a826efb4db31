"""A run's folder: refused when it is in use or holds results, locked while a process works in it."""

import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from apprentice.errors import BadInput
from harness.runs import launch
from harness.runs.files import recorded, recording, remove_recorded, write_text

# Files of runs that have no record of their files: a folder with one of these is not taken for a new one.
RUN_FILES = ("config.yaml", "environment.json", "results.*", "seed[0-9]*/*.json", "seed[0-9]*/*.ckpt")
LOCK = ".lock"
JOB = ".job"  # the torchrun job that opened the folder last


def new_folder(experiment: str, job: str = "") -> Path:
    """A new folder `runs/<experiment>/<time>`, the same for all processes of a call and after a restart of its job."""
    parent = Path("runs") / experiment
    if launch.ranks() > 1:
        with launch.main_first("new folder"):
            if launch.is_main_process():
                launch.store_set("out", _opened_before_or_new(parent, job))
        return Path(launch.store_get("out"))
    variable = f"APPRENTICE_OUT_{experiment.upper()}"
    if variable not in os.environ:  # sub-processes that Lightning starts run the script again and read it
        os.environ[variable] = _opened_before_or_new(parent, job)
    return Path(os.environ[variable])


def _opened_before_or_new(parent: Path, job: str) -> str:
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
    """Whether this torchrun job opened the folder last. Jobs without --rdzv_id share the id "none" at first."""
    run_id, path = job.partition("\n")[0], out / JOB
    restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" if run_id == "none" else run_id != ""
    return restarted and path.exists() and path.read_text() == job


@contextmanager
def opened(out: Path, resume: bool = False, overwrite: bool = False, job: str = "") -> Iterator[Path]:
    """Create, check and lock the folder. Where ranks have joined, rank zero does that before the others enter.

    A torchrun job (`launch.torchrun_job`) that restarts its ranks resumes in its folder without `resume`.

    Raises:
        BadInput: the folder can't be written or is in use; it holds a run, and neither `resume` nor `overwrite` is set;
            or `overwrite` is set and a file that may be a run's is in no record.
    """
    with ExitStack() as stack:
        with launch.main_first("folder"):
            if launch.is_main_process():
                _check_seeds(out)
                goes_on = resume or _is_restart(out, job)
                if not goes_on and not (out / LOCK).exists():  # a folder of another's stays as it is
                    _check_free(out, overwrite)
                stack.callback(_locked(out).release)
                found = run_files(out) if resume else []
                if found and not (out / "config.yaml").exists():
                    missing = f"config.yaml in {out}, which holds {found[0]} of a run with unknown settings"
                    raise BadInput("resume", "true", missing)
                if resume and not found:
                    sys.stderr.write(f"{out} holds no run to go on with: a new one starts\n")
                if not goes_on:
                    _check_free(out, overwrite)
                    remove_recorded(out)
                write_text(out / JOB, job)
        with recording(out):
            yield out


def _locked(out: Path) -> FileLock:
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
        exists = "a link that leads nowhere" if out.is_symlink() else "a file"
        why = f"this is {exists}" if isinstance(error, FileExistsError) else error.strerror
        raise BadInput("out", out, f"a folder that can be written ({why})") from None
    return lock


def _check_seeds(out: Path) -> None:
    """Raise BadInput if a seed has a file, or a link that leads nowhere, instead of a folder or a link to one."""
    for path in out.glob("seed[0-9]*"):
        if path.name.removeprefix("seed").isdecimal() and not path.is_dir():
            raise BadInput(
                "out", out, f"folders for seeds; {path} is {'a broken link' if path.is_symlink() else 'a file'}"
            )


def run_files(out: Path) -> list[str]:
    """Names of the files that a run has left in a folder; none in a new one."""
    known = [path for pattern in RUN_FILES for path in sorted(out.glob(pattern))]
    return list(dict.fromkeys(path.relative_to(out).as_posix() for path in [*recorded(out), *known]))


def _check_free(out: Path, overwrite: bool) -> None:
    """Raise BadInput if the folder holds a run that is not to be overwritten, or a file that may be another's."""
    found = run_files(out)
    if found and not overwrite:
        raise BadInput("out", out, f"a new folder, as this one holds {found[0]}; or --resume true, --overwrite true")
    ours = {path.relative_to(out).as_posix() for path in recorded(out)}
    if others := [name for name in found if name not in ours]:
        more = f" and {len(others) - 1} more are" if len(others) > 1 else " is"
        advice = f"{out / others[0]}{more} in no record: delete that by hand, or take another --out"
        raise BadInput("overwrite", "true", f"a folder whose files a run has recorded; {advice}")
