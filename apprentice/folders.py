"""A run's folder: refused when it is in use or holds results, locked while a process works in it."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from apprentice.errors import BadInput

OURS = ("config.yaml", "environment.json", "results.json", "results.md", "results.png", "seed*")


def is_main_process() -> bool:
    """Whether this process is the one that starts and writes: not a rank that a launcher or Lightning started."""
    ranks = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")
    return int(next((os.environ[name] for name in ranks if name in os.environ), "0")) == 0


def new_folder(experiment: str) -> Path:
    """A fresh folder `runs/<experiment>/<time>`, the same for all processes of one invocation."""
    variable = f"APPRENTICE_OUT_{experiment.upper()}"
    if is_main_process() or variable in os.environ:
        name = os.environ.get(variable) or _fresh(Path("runs") / experiment)
        os.environ[variable] = name  # sub-processes that Lightning starts run the script again and find it here
    return Path(_agreed(name if is_main_process() else "") if "TORCHELASTIC_RUN_ID" in os.environ else name)


def _fresh(parent: Path) -> str:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in ("", *(f"_{i}" for i in range(2, 1000))):
        try:
            (parent / f"{stamp}{suffix}").mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BadInput("out", parent, f"a folder that can be written ({error.strerror})") from None
        return str(parent / f"{stamp}{suffix}")
    raise BadInput("out", parent, "a folder with room for another run")


def _agreed(name: str) -> str:
    """Rank zero's name, through the store that torchrun keeps for its workers."""
    store = _store()
    if name:
        store.set("out", name)
    return store.get("out").decode()


def _store() -> Any:
    from torch.distributed import PrefixStore, rendezvous

    store, _, _ = next(iter(rendezvous("env://")))
    return PrefixStore(f"apprentice/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@contextmanager
def main_first(task: str) -> Iterator[None]:
    """Under torchrun rank zero runs the block before the others do: it downloads, or clears a folder, once."""
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched and not is_main_process():
        _store().get(task)
    yield
    if launched and is_main_process():
        _store().set(task, "done")


@contextmanager
def opened(out: Path, resume: bool = False, overwrite: bool = False) -> Iterator[Path]:
    """Create, check and lock the folder; ranks that were started by others find it ready.

    Raises:
        BadInput: it can't be written, is in use, or holds a run and neither `resume` nor `overwrite` is set.
    """
    if not is_main_process():
        with main_first("folder"):
            yield out
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = FileLock(out / ".lock")
        try:
            lock.acquire(timeout=3)  # ranks of a killed run may need a moment to go away
        except Timeout:
            raise BadInput("out", out, f"a folder not in use; process {_owner(out)} works in it") from None
        (out / ".pid").write_text(str(os.getpid()))
    except OSError as error:
        raise BadInput("out", out, f"a folder that can be written ({error.strerror})") from None
    try:
        with main_first("folder"):
            if not resume:
                _clear(out, overwrite)
        yield out
    finally:
        lock.release()


def _owner(out: Path) -> str:
    pid = out / ".pid"
    return pid.read_text() if pid.exists() else "unknown"


def _clear(out: Path, overwrite: bool) -> None:
    found = [path for pattern in OURS for path in out.glob(pattern)]
    if found and not overwrite:
        raise BadInput(
            "out", out, f"a new folder, as this one holds {found[0].name}; or --resume true, --overwrite true"
        )
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
