"""Runs tests on GPUs in forks of this process, which itself never uses CUDA: after that no fork could."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import Run

LIMIT = 240.0  # seconds of a fork


def gpus(*counts: int) -> list[Any]:
    """Parameters, each of which needs so many GPUs."""
    return [pytest.param(count, marks=pytest.mark.gpu(count)) for count in counts]


def on_gpu(path: Path, function: Callable[..., None], *args: Any) -> None:
    """Call a function in a fork; what it raises fails the test."""
    run = Run(function, *args, log=path / "log")
    assert run.wait(LIMIT) == 0, run.output
