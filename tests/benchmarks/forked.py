"""What benchmarks start, as forks of this process: fresh ones, as users have, import torch for seconds each."""

import importlib
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks import common
from tests.processes import CONTEXT, Run


def start_forks(patched: pytest.MonkeyPatch) -> None:
    """Have functions and experiments run in forks; some tests start theirs as users do."""
    patched.setattr(common, "call_fresh", _call)
    patched.setattr(common, "run_program", _run)


def _begin() -> None:
    torch.set_num_threads(1)
    warnings.resetwarnings()  # pytest has made them errors


def _call(function: Callable[..., Any], *args: Any, env: Mapping[str, str]) -> Any:
    with patch.dict(os.environ, env), ProcessPoolExecutor(1, CONTEXT, _begin) as processes:
        return processes.submit(function, *args).result()


def _run(command: Sequence[str], env: Mapping[str, str] | None, **_: Any) -> subprocess.CompletedProcess[str]:
    def main() -> None:
        _begin()
        os.environ.update(env or {})
        importlib.import_module(f"experiments.{Path(command[1]).stem}").main(command[2:])

    with tempfile.TemporaryDirectory() as folder:
        run = Run(main, log=Path(folder) / "log")
        return subprocess.CompletedProcess(command, run.wait(), stderr=run.output)
