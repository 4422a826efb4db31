"""Trainers for the cases of a study, on the devices of this machine."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from apprentice.errors import BadInput
from harness import config
from harness.runs.fit import MakeTrainer
from harness.runs.trainer import trainers
from harness.studies.isolation import can_fork
from strategies import NAMES

TIMEOUT = 300.0  # seconds to wait for a rank that hangs, not the half hour of a run that matters
DURATION = (
    "max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "limit_train_batches", "limit_val_batches",
)  # fmt: skip
QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0,
    "max_epochs": -1,
}  # fmt: skip


def default_devices() -> int | str:
    """All GPUs, or two processes where there are none."""
    return "auto" if torch.cuda.is_available() else 2


def with_strategy(trainer: config.Choice, strategy: Any, exact: int | None = None, one: bool = False) -> MakeTrainer:
    """Makes Trainers with the user's settings and this strategy; `one`: on the first device alone.

    Ranks are forked if the strategy may choose: on GPUs it would start this script again in each.
    """
    if isinstance(strategy, config.Choice) and strategy.init_args.get("start_method") == "auto" and can_fork():
        strategy = replace(strategy, init_args=strategy.init_args | {"start_method": "fork"})
    settings = {**trainer.init_args, "strategy": strategy}
    if one:
        chosen = settings["devices"]
        settings["devices"] = chosen[:1] if isinstance(chosen, list) else 1
    return trainers(config.Choice(trainer.class_path, settings), exact, NAMES)


def check_left_out(trainer: config.Choice, keys: Sequence[str], instead: str) -> None:
    """Raise BadInput if the user sets one of the Trainer's options that the study sets."""
    for key in keys:
        if (value := trainer.init_args[key]) not in {None, -1}:
            raise BadInput(f"trainer.{key}", value, f"it left out: {instead}")


def check_forks(probe: Trainer) -> None:
    """Raise BadInput unless ranks are processes that this one starts."""
    if probe.num_nodes > 1:
        raise BadInput("trainer.num_nodes", probe.num_nodes, "1: one machine is measured")
    environment = getattr(probe.strategy, "cluster_environment", None)
    if environment is not None and environment.creates_processes_externally:
        raise BadInput("trainer.devices", probe.num_devices, "a start without torchrun or srun: ranks are forked here")


def with_timeout(choice: config.Choice) -> config.Choice:
    """The strategy with a shorter timeout, if it has one."""
    return replace(choice, init_args=choice.init_args | ({"timeout": TIMEOUT} if "timeout" in choice.init_args else {}))
