"""environment.json: the machine, and each call of a run with its command line and the commit of the code that ran."""

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
CHANGED = 20  # names of changed files that are kept


def facts(out: Path, prog: str, argv: Sequence[str]) -> dict[str, Any]:
    """The content of environment.json in a run's folder: machine, versions, threads, and all `calls`, this one last.

    Earlier calls are taken from the folder; null stands for those that the file there doesn't tell about.
    """
    threads = {"os": platform.platform(), "threads": torch.get_num_threads()}
    variables = {name.lower(): os.environ.get(name) for name in THREADS}
    calls = [*_recorded(out), _call(prog, argv)]
    return {**environment.hardware(), **environment.versions(), **threads, **variables, "calls": calls}


def commits(out: Path) -> list[str | None]:
    """The commits of a run's calls, each once; `-dirty` follows that of a changed checkout, None is an unknown one."""
    known = [call if call and call.get("commit") else None for call in _recorded(out)]
    found = [None if call is None else f"{call['commit']}{'-dirty' if call.get('dirty') else ''}" for call in known]
    return list(dict.fromkeys(found))


def commands(out: Path) -> list[str]:
    """The command lines of a run's calls, each once, the first one first."""
    return list(dict.fromkeys(call["command"] for call in _recorded(out) if call and call.get("command")))


def command(prog: str, argv: Sequence[str]) -> str:
    """The command line of this call, as it was typed; of a call of `main` in Python, one that does the same."""
    return shlex.join(sys.orig_argv if sys.argv[1:] == [*argv] else [prog, *argv])


def program(script: str) -> str:
    """How to start a script of the experiments: with Python in a clone, or as a sub-command of the installed one."""
    if any(Path(word).name == "apprentice" for word in sys.orig_argv[:2]):
        return f"apprentice {Path(script).stem}"
    return f"python experiments/{script}"


def _recorded(out: Path) -> list[dict[str, Any] | None]:
    if not (out / FILE).exists():
        return []
    try:
        calls = json.loads((out / FILE).read_text("utf-8"))["calls"]
        return [call if isinstance(call, dict) else None for call in calls]
    except (ValueError, LookupError, TypeError, RecursionError):  # of an older version, or changed by hand
        return [None]


def _call(prog: str, argv: Sequence[str]) -> dict[str, Any]:
    started_by = launch.launched()
    return {
        "command": command(prog, argv),
        "launcher": started_by and {"name": started_by.by, "ranks": started_by.size, "nodes": started_by.nodes},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **checkout(Path(__file__)),
    }


def checkout(file: Path) -> dict[str, Any]:
    """The `commit` of the repository that tracks a file, whether it is `dirty`, and which tracked files `changed`.

    All are None where no repository tracks it, such as in an installed package, and where git is missing or too slow.
    """

    def git(*arguments: str) -> list[str]:
        command = ["git", "--no-optional-locks", "-C", str(file.parent), *arguments]
        done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8", timeout=GIT_SECONDS)
        return done.stdout.splitlines()

    try:
        git("ls-files", "--error-unmatch", file.name)  # a package in .venv is in the user's repository, not of it
        (commit,), changed = git("rev-parse", "HEAD"), git("diff", "--name-only", "HEAD")
    except (OSError, subprocess.SubprocessError, ValueError):
        return {"commit": None, "dirty": None, "changed": None}
    return {"commit": commit, "dirty": bool(changed), "changed": changed[:CHANGED]}
