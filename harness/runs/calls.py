"""environment.json: the machine, and the calls of a run, each with its command line and the commit of the code."""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.runs import environment, launch

FILE = "environment.json"
THREADS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
GIT_SECONDS = 10
CHANGED = 20  # names of changed files to keep


def facts(out: Path, prog: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the content of environment.json in a run's folder: machine, versions, threads and `calls`, this one last.

    Earlier calls are read from the folder; null stands for a call that can't be read.
    """
    threads = {"os": platform.platform(), "threads": torch.get_num_threads()}
    variables = {name.lower(): os.environ.get(name) for name in THREADS}
    calls = [*_read_calls(out), _call(prog, argv)]
    return {**environment.hardware(), **environment.versions(), **threads, **variables, "calls": calls}


def commits(out: Path) -> list[str | None]:
    """Return the commits of a run's calls, each once, with `-dirty` for a changed checkout; None if unknown."""

    def commit_of(call: dict[str, Any] | None) -> str | None:
        if not call or not call.get("commit"):
            return None
        return f"{call['commit']}{'-dirty' if call.get('dirty') else ''}"

    return list(dict.fromkeys(map(commit_of, _read_calls(out))))


def commands(out: Path) -> list[str]:
    """Return the command lines of a run's calls, each once, in order."""
    return list(dict.fromkeys(call["command"] for call in _read_calls(out) if call and call.get("command")))


def command(prog: str, argv: Sequence[str]) -> str:
    """Return the command line of this call as typed; for a call of `main` in Python, one that does the same."""
    return shlex.join(sys.orig_argv if sys.argv[1:] == [*argv] else [prog, *argv])


def program(script: str) -> str:
    """Return how to start an experiment: its script in a clone, or a sub-command of the installed `apprentice`."""
    if any(Path(word).name == "apprentice" for word in sys.orig_argv[:2]):
        return f"apprentice {Path(script).stem}"
    return f"python experiments/{script}"


def _read_calls(out: Path) -> list[dict[str, Any] | None]:
    if not (out / FILE).exists():
        return []
    try:
        calls = json.loads((out / FILE).read_text("utf-8"))["calls"]
        return [call if isinstance(call, dict) else None for call in calls]
    except (ValueError, LookupError, TypeError, RecursionError):  # changed by hand
        return [None]


def _call(prog: str, argv: Sequence[str]) -> dict[str, Any]:
    started_by = launch.find_launch()
    return {
        "command": command(prog, argv),
        "launcher": started_by and {"name": started_by.by, "ranks": started_by.size, "nodes": started_by.nodes},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **checkout(Path(__file__)),
    }


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
