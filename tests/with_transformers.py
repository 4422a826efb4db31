"""Calls in forks of a process that has imported transformers: that takes seconds, and here it would stay imported."""

import functools
import importlib
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from apprentice.children import following
from tests.language_parts import save_llama
from tests.processes import Run


def call(function: Callable[..., object], *args: Any) -> str:
    """What a module's function prints, with this process's folder, paths, variables and filters of warnings."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        _server().send((function, args, log, Path.cwd(), sys.path, dict(os.environ), warnings.filters))
        assert _server().recv() == 0, log.read_text()
        return log.read_text()


def in_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Call a test in such a fork, with fixtures and parameters that can be pickled."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        call(_unwrapped, test.__module__, test.__name__, fixtures)

    return run


def _unwrapped(module: str, name: str, fixtures: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**fixtures)


@functools.cache
def _server() -> Any:
    ours, theirs = multiprocessing.Pipe()
    follow = following()
    if os.fork():
        theirs.close()
        return ours
    try:
        follow()
        ours.close()
        _serve(theirs)
    finally:
        os._exit(1)


def _serve(connection: Any) -> None:
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as folder:
        import transformers

        save_llama(Path(folder))
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    while True:
        function, args, log, cwd, sys.path[:], variables, filters = connection.recv()
        connection.send(_run(function, args, log, cwd, variables, filters))


def _run(function: Any, args: Any, log: Path, cwd: Path, variables: dict[str, str], filters: Any) -> int | str:
    def main() -> None:
        os.chdir(cwd)
        os.environ.update(variables)
        warnings.filters[:] = filters
        function(*args)

    try:
        return Run(main, log=log).wait()
    except AssertionError as error:
        return str(error)
