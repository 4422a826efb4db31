"""The user's loggers beside the TensorBoard runs."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from lightning.pytorch.loggers import Logger

from harness import cli

NAMES = ("run_name", "name")  # constructors' arguments for a run's name


def make_loggers(value: Any, run: str) -> list[Logger]:
    """Make the loggers of `--trainer.logger`, with this name of their run unless the user set one.

    Raises:
        BadInput: a logger's package is missing, or its constructor refuses an option.
    """
    key = "trainer.logger"
    if isinstance(value, list):
        return [_make_logger(choice, f"{key}.{place}", run) for place, choice in enumerate(value)]
    return [] if isinstance(value, bool) else [_make_logger(value, key, run)]


def _make_logger(choice: cli.Choice, key: str, run: str) -> Logger:
    options = choice.signature(key)
    name = next((name for name in NAMES if name in options.hints), None)
    if name is not None and choice.init_args[name] == options.defaults[name]:
        choice = replace(choice, init_args={**choice.init_args, name: run})
    logger: Logger = cli.build(choice, key)
    return logger


def finish_runs(loggers: Iterable[Logger]) -> None:
    """End this process's runs of Weights & Biases, as its next logger would continue an open one."""
    if any(type(logger).__name__ == "WandbLogger" for logger in loggers) and "wandb" in sys.modules:
        sys.modules["wandb"].finish()
