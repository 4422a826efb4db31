"""Filters of libraries' messages that users need not read, and notices to users."""

import logging
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from harness.runs.launch import is_main_process

EXPECTED_WARNINGS = (
    r"Found \d+ module\(s\) in eval mode",  # the teacher always is
    r".*isinstance\(treespec, LeafSpec\)",  # Lightning 2.6 with torch 2.15
    r"`weights_only` was not set",  # Lightning reads a rank's weights back into this process
    r"The '(train|val|test)_dataloader' does not have many workers",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    r".*joblib will operate in serial mode",  # where /dev/shm can't be written
    r"The PyTorch API of nested tensors is in prototype stage",
    r"Glyph \d+ .* missing from font",  # names of users' classes in pictures
)
# Loggers by which Lightning prints the results of flags: --trainer.profiler and enable_model_summary.
OF_FLAGS = ("lightning.pytorch.profilers.profiler", "lightning.pytorch.callbacks.model_summary")


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, Lightning's information and expected warnings are silent; other warnings are one line."""
    levels = {"lightning.pytorch": logging.WARNING, "lightning.fabric": logging.WARNING}
    levels["torch.utils.cpp_extension"] = logging.ERROR  # "No CUDA runtime is found", where Inductor compiles
    levels["torch.multiprocessing.spawn"] = logging.ERROR  # names of ranks that it ends when one has failed
    formatter = warnings.formatwarning
    with log_levels(levels | dict.fromkeys(OF_FLAGS, logging.INFO)), warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        warnings.filterwarnings("ignore", module=r"lit_modules\.nets\.attention\.")  # the refusal has torch's reasons
        warnings.formatwarning = _line
        try:
            yield
        finally:
            warnings.formatwarning = formatter


@contextmanager
def silence(*names: str) -> Iterator[None]:
    """Inside, these loggers report errors only, and warnings are ignored."""
    with log_levels(dict.fromkeys(names, logging.ERROR)), warnings.catch_warnings(action="ignore"):
        yield


@contextmanager
def log_levels(levels: Mapping[str, int]) -> Iterator[None]:
    """Inside, loggers have these levels."""
    before = {name: logging.getLogger(name).level for name in levels}
    try:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def _line(message: Warning | str, *_: Any, **__: Any) -> str:
    """Format a warning as one line, without its source."""
    return f"warning: {' '.join(str(message).split())}\n"


def notice(line: str) -> None:
    """Print a line to the user, in the main process alone."""
    if is_main_process():
        if sys.stdout.isatty():
            line = textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent="  ")
        print(line, flush=True)
