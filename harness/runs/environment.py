"""The machine and the calls of a run, as environment.json has them; limits of its threads and memory."""

import ctypes
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from harness.runs import launch

PACKAGES = ("apprentice", "torch", "torchvision", "lightning", "torchmetrics", "tensorboard")
OF_TEXTS = ("transformers", "tokenizers", "peft", "datasets", "trl")  # named where they are installed
ABSENT = "not installed"
FILE = "environment.json"
JOBS = "jobs"  # the folder of what a launcher's jobs leave; each has a file of its machine
THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
GIT_SECONDS = 10
CHANGED = 20  # names of changed files to keep


def hardware() -> dict[str, Any]:
    """Return processor, cores, memory in GiB and GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if hasattr(os, "sysconf") else None
    # Reading a GPU's name initialises CUDA, after which a fork can't use it.
    initialized = torch.cuda.is_initialized()
    gpus = [torch.cuda.get_device_name(i) if initialized else "GPU" for i in range(torch.cuda.device_count())]
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*:(.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    cpu = model[1].strip() if model else platform.processor() or platform.machine()
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": memory and round(memory, 1), "gpus": gpus}


def machines(out: Path) -> list[dict[str, Any]]:
    """Return the `hardware` of the jobs of a run, by their names in order; none of a run without jobs."""
    found = []
    for path in sorted((out / JOBS).glob("*.json")):
        with suppress(OSError, ValueError):  # one that is being written
            found.append(json.loads(path.read_text("utf-8")))
    return found


def describe(machine: Mapping[str, Any]) -> str:
    """Return processor, cores and GPUs of a `hardware` in words."""
    gpus = ", ".join(machine["gpus"])
    return f"{machine['cpu']} with {machine['cores']} cores{f' and {gpus}' if gpus else ''}"


def limit_threads(input_shape: Sequence[int]) -> None:
    """Use one thread for tiny images (C, H, W), unless OMP_NUM_THREADS is set.

    A step of LightNN on 8 x 8 images takes 2 ms with one thread and up to 34 ms with two on a busy machine. The rule
    depends on the inputs alone because the number of threads changes a kernel's bits.
    """
    if "OMP_NUM_THREADS" not in os.environ and len(input_shape) == 3 and math.prod(input_shape[1:]) <= 256:
        torch.set_num_threads(1)


def hide_gpus() -> None:
    """Hide GPUs from a run on CPUs: autograd starts a thread for each one, after which no fork can run a backward."""
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def keep_memory() -> None:
    """Make glibc keep freed memory: a CPU's steps are a fifth faster, peak memory is up to a fifth larger."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # other C libraries have none
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 2**30)
        libc.mallopt(trim_threshold, 2**31 - 1)


def measurement_conditions() -> dict[str, Any]:
    """Return the conditions of a measurement: date, load, hardware and versions."""
    load = os.getloadavg()[0]
    return {"date": time.strftime("%Y-%m-%d"), "load_before": load, "hardware": hardware(), "versions": versions()}


def versions(*packages: str) -> dict[str, str]:
    """Return versions of Python, of the packages on which numbers depend, and of others."""
    return {"python": platform.python_version()} | {name: _version(name) for name in (*PACKAGES, *packages)}


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path, not installed
        return ABSENT


def facts(out: Path, prog: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the content of environment.json in a run's folder: machine, versions, threads and `calls`, this one last.

    Earlier calls are read from the folder; null stands for a call that can't be read.
    """
    threads = {"os": platform.platform(), "threads": torch.get_num_threads()}
    variables = {name.lower(): os.environ.get(name) for name in THREADS}
    started_by = launch.find_launch()
    call = {
        "command": command(prog, argv),
        "launcher": started_by and {"name": started_by.by, "ranks": started_by.size, "nodes": started_by.nodes},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **checkout(Path(__file__)),
    }
    of_texts = {name: version for name in OF_TEXTS if (version := _version(name)) != ABSENT}
    return {**hardware(), **versions(), **of_texts, **threads, **variables, "calls": [*_read_calls(out), call]}


def commits(out: Path) -> list[str | None]:
    """Return the commits of a run's calls, each once, with `-dirty` for a changed checkout; None if unknown."""
    return list(dict.fromkeys(map(_commit_of, _read_calls(out))))


def last_commit(out: Path) -> str | None:
    """Return the commit of a run's last call, likewise."""
    return _commit_of(next(reversed(_read_calls(out)), None))


def _commit_of(call: dict[str, Any] | None) -> str | None:
    if not call or not call.get("commit"):
        return None
    return f"{call['commit']}{'-dirty' if call.get('dirty') else ''}"


def commands(out: Path) -> list[str]:
    """Return the command lines of a run's calls, each once, in order."""
    return list(dict.fromkeys(call["command"] for call in _read_calls(out) if call and call.get("command")))


def command(prog: str, argv: Sequence[str]) -> str:
    """Return the command line of this call as typed; for a call of `main` in Python, one that does the same."""
    return shlex.join(sys.orig_argv if sys.argv[1:] == [*argv] else [prog, *argv])


def _read_calls(out: Path) -> list[dict[str, Any] | None]:
    if not (out / FILE).exists():
        return []
    try:
        calls = json.loads((out / FILE).read_text("utf-8"))["calls"]
        return [call if isinstance(call, dict) else None for call in calls]
    except (ValueError, LookupError, TypeError, RecursionError):  # changed by hand
        return [None]


def checkout(file: Path) -> dict[str, Any]:
    """Return the `commit` of the repository that tracks a file, whether it is `dirty`, and which files `changed`.

    All are None if no repository tracks the file, as in an installed package, and if git is missing or too slow.
    """

    def git(*arguments: str) -> list[str]:
        command = ["git", "--no-optional-locks", "-C", str(file.parent), *arguments]
        result = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=GIT_SECONDS)
        return result.stdout.splitlines()

    try:
        git("ls-files", "--error-unmatch", file.name)  # a package in .venv lies in the user's repository, untracked
        (commit,), changed = git("rev-parse", "HEAD"), git("diff", "--name-only", "HEAD")
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"commit": None, "dirty": None, "changed": None}
    return {"commit": commit, "dirty": bool(changed), "changed": changed[:CHANGED]}
