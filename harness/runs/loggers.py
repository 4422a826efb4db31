"""Loggers of Lightning's, or of anyone's, beside our TensorBoard runs."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning.pytorch.loggers import Logger

from harness import cli
from harness.cli.classes import imported
from harness.cli.signatures import options_of

NAMES = ("run_name", "name")  # what constructors call a run's name


def chosen(value: Any, run: str) -> list[Logger]:
    """New loggers as `--trainer.logger` has them, whose run has this name where the user gave none.

    Raises:
        BadInput: a logger's package is missing, or its constructor refuses an option.
    """
    key = "trainer.logger"
    if isinstance(value, list):
        return [_made(choice, f"{key}.{place}", run) for place, choice in enumerate(value)]
    return [] if isinstance(value, bool) else [_made(value, key, run)]


def _made(choice: cli.Choice, key: str, run: str) -> Logger:
    options = options_of(imported(choice.class_path, key))
    name = next((name for name in NAMES if name in options.hints), None)
    if name is not None and choice.init_args[name] == options.defaults[name]:
        choice = replace(choice, init_args={**choice.init_args, name: run})
    made: Logger = cli.build(choice, key)
    return made


def end(loggers: Iterable[Logger]) -> None:
    """End the runs of Weights & Biases of this process: its next logger would go on with an open one."""
    if any(type(logger).__name__ == "WandbLogger" for logger in loggers) and "wandb" in sys.modules:
        sys.modules["wandb"].finish()
