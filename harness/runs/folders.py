"""A run's folder: refused when it is in use or holds results, locked while a process works in it."""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from harness.runs import job, manifest
from apprentice.errors import BadInput
from harness.runs.files import write_json

# What runs write that goes by a fixed name: a folder that holds some of it is not taken for a new one.
OURS = (
    "config.yaml", "environment.json", "results.json", "results.md", "results.png",
    "timeline.png", "timelines.json", "kernels.png", "blocks.png", "trace_eager.json", "trace_compiled.json",
    *(f"seed[0-9]*/{stage}.{kind}" for stage in ("teacher", "students", "student", "gpt") for kind in ("json", "ckpt")),
    "seed[0-9]*/int8-qat.ckpt", "seed[0-9]*/int8-qat/best.pt",
    *(f"{form}/{file}" for form in ("float32", "bfloat16", "int8-ptq", "int8-qat")
      for file in ("model.pt2", "model.onnx", "weights.safetensors")),
)  # fmt: skip

AGENTS = ".agents"  # those of torchrun that have started the ranks, if it has


def new_folder(experiment: str) -> Path:
    """A fresh folder `runs/<experiment>/<time>`, the same for all processes of one invocation, restarted ones too."""
    parent, agents = Path("runs") / experiment, job.agents()
    if job.ranks() > 1:
        with job.main_first("new folder"):
            if job.is_main_process():
                job.store_set("out", str(_restarted(parent, agents) or _fresh(parent)))
        return Path(job.store_get("out"))
    variable = f"APPRENTICE_OUT_{experiment.upper()}"
    if variable not in os.environ:  # sub-processes that Lightning starts run the script again and find it here
        os.environ[variable] = str(_restarted(parent, agents) or _fresh(parent))
    return Path(os.environ[variable])


def _restarted(parent: Path, agents: set[str]) -> Path | None:
    """The folder in which this very job has begun, if it was restarted."""
    return next((path for path in sorted(parent.glob("*")) if agents & _opened_by(path)), None)


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


@contextmanager
def opened(out: Path, resume: bool = False, overwrite: bool = False) -> Iterator[Path]:
    """Create, check and lock the folder; ranks that were started by others find it ready.

    A job of torchrun's that restarts its ranks goes on in the folder that it has opened before.

    Raises:
        BadInput: it can't be written or is in use; it holds a run, and neither `resume` nor `overwrite` is set; or with
            `overwrite` it holds files that may be a run's and are in no record.
    """
    agents = job.agents()
    if not job.is_main_process():
        with job.main_first("folder"), manifest.recording(out):
            yield out
        return
    with job.main_first("folder"):
        lock = _locked(out)
        try:
            found = holds(out) if resume else []
            if found and not (out / "config.yaml").exists():
                missing = f"config.yaml in {out}, which holds {found[0]} of a run with unknown settings"
                raise BadInput("resume", "true", missing)
            if resume and not found:
                sys.stderr.write(f"{out} holds no run to go on with: a new one starts\n")
            if not (resume or agents & _opened_by(out)):
                _clear(out, overwrite)
            write_json(out / AGENTS, sorted(agents))
        except BaseException:
            lock.release()
            raise
    try:
        with manifest.recording(out):
            yield out
    finally:
        lock.release()


def _locked(out: Path) -> FileLock:
    lock = FileLock(out / ".lock")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=3)  # ranks of a killed run may need a moment to go away
        (out / ".pid").write_text(str(os.getpid()))
    except Timeout:
        raise BadInput("out", out, f"a folder not in use; process {_owner(out)} works in it") from None
    except OSError as error:
        lock.release()
        raise BadInput("out", out, f"a folder that can be written ({error.strerror})") from None
    return lock


def _opened_by(out: Path) -> set[str]:
    """The agents of the job that has opened a folder last."""
    path = out / AGENTS
    return set(json.loads(path.read_text())) if path.exists() else set()


def _owner(out: Path) -> str:
    pid = out / ".pid"
    return pid.read_text() if pid.exists() else "unknown"


def holds(out: Path) -> list[str]:
    """Names of the files that a run has left in a folder; none in a new one."""
    known = [path for pattern in OURS for path in sorted(out.glob(pattern))]
    return list(dict.fromkeys(path.relative_to(out).as_posix() for path in [*manifest.recorded(out), *known]))


def _clear(out: Path, overwrite: bool) -> None:
    found = holds(out)
    if found and not overwrite:
        raise BadInput("out", out, f"a new folder, as this one holds {found[0]}; or --resume true, --overwrite true")
    own = {path.relative_to(out).as_posix() for path in manifest.recorded(out)}
    if others := [name for name in found if name not in own]:
        more = f" and {len(others) - 1} more are" if len(others) > 1 else " is"
        told = f"{out / others[0]}{more} in no record: delete that by hand, or take another --out"
        expected = f"a folder whose files a run has recorded; {told}"
        raise BadInput("overwrite", "true", expected)
    manifest.remove(out)
