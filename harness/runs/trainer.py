"""Trainers and loggers as the command line configures them, for the ranks of any launcher."""

import inspect
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import environments
from lightning.pytorch.plugins.environments import ClusterEnvironment

from apprentice import extras
from apprentice.errors import BadInput
from harness import cli
from harness.runs import environment
from harness.runs.launch import Launch, find_launch
from harness.runs.progress import Show
from harness.runs.training_options import Strategies

# With the user's settings; takes callbacks, logger and plugins by keyword, and `show` as `trainer_factory` has it.
MakeTrainer = Callable[..., Trainer]
REFUSALS = (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException)  # for options of the Trainer
NAMES = ("run_name", "name")  # loggers' arguments for a run's name


def trainer_factory(chosen: cli.Choice, exact: int | None) -> MakeTrainer:
    """Return a maker of Trainers, which takes their arguments by keyword; `callbacks` and `plugins` add to the user's.

    It also takes `show`, of type `progress.Show`; a progress bar of Lightning's that the user chose replaces it.

    `chosen` is of `cli.Parser`; without a chosen strategy, ddp serves `exact`.

    Raises:
        BadInput: a strategy or precision that does not support `exact`; when called, what Lightning refuses.
    """
    if exact is None:
        return partial(_trainer, chosen)
    strategy, family = chosen.init_args["strategy"], Strategies()
    if strategy == "auto":
        strategy = family.choose("ddp")
    if not family.exact(strategy):
        names = ", ".join(name for name in family.names if family.exact(family.choose(name)))
        raise BadInput("exact", exact, f"a strategy that can hold it: {names}; {family.label(strategy)} can't")
    if str(chosen.init_args.get("precision")) in {"16", "16-mixed"}:
        raise BadInput("exact", exact, "`trainer.precision` other than 16-mixed, whose loss scale it can't hold")
    strategy = replace(strategy, init_args={**strategy.init_args, "exact": exact})
    return partial(_trainer, replace(chosen, init_args={**chosen.init_args, "strategy": strategy}))


def _trainer(
    chosen: cli.Choice,
    callbacks: Sequence[Any] = (),
    plugins: Sequence[Any] = (),
    show: Show | None = None,
    **options: Any,
) -> Trainer:
    chosen = replace(chosen, init_args={**chosen.init_args, "logger": False})  # a fit passes its loggers
    settings = cli.arguments(chosen, "trainer")
    settings |= {name: settings[name] or 0 for name in ("enable_model_summary", "num_sanity_val_steps")} | options
    if settings["accelerator"] == "auto" and torch.backends.mps.is_available():
        settings["accelerator"] = "cpu"  # evaluation adds in float64, which Apple's GPUs don't have
    for name, added in (("callbacks", callbacks), ("plugins", plugins)):
        chosen_ones = settings[name] or []
        settings[name] = [*(chosen_ones if isinstance(chosen_ones, list) else [chosen_ones]), *added]
    if settings.get("enable_checkpointing") is False:
        settings["callbacks"] = [c for c in settings["callbacks"] if not isinstance(c, Checkpoint)]
    enabled, bars = settings["enable_progress_bar"], [c for c in settings["callbacks"] if isinstance(c, ProgressBar)]
    settings["enable_progress_bar"] = bool(bars or (show and enabled))
    if show and not settings["enable_progress_bar"]:
        settings["callbacks"].append(show(enabled is None))
    settings = with_launcher(settings)
    try:
        with cli.refusals(chosen, "trainer", REFUSALS):
            trainer = Trainer(**settings)
    except BadInput as error:
        if error.argument != "trainer":
            flag = error.argument.replace("trainer.strategy.exact", "exact")
            raise BadInput(flag, error.value, error.expected) from error
        expected = f"what Lightning takes on this machine: {error.__cause__}"
        raise BadInput(*_find_fault(chosen, settings), expected) from None
    if trainer.strategy.root_device.type == "cpu":
        environment.hide_gpus()
    return trainer


def _find_fault(chosen: cli.Choice, settings: dict[str, Any]) -> tuple[str, Any]:
    """Find the first option, with its value, without which the Trainer can be made; else return the accelerator."""
    defaults = inspect.signature(Trainer).parameters
    for name, value in chosen.init_args.items():
        if value != (default := defaults[name].default):
            with suppress(*REFUSALS):
                Trainer(**{**settings, name: default})
                return f"trainer.{name}", value.name if isinstance(value, cli.Choice) else value
    return "trainer.accelerator", f"{settings['accelerator']} `trainer.devices {settings['devices']}`"


def with_launcher(settings: dict[str, Any]) -> dict[str, Any]:
    """Add the launcher's cluster environment to a Trainer's settings, and its devices and nodes unless set."""
    launch = find_launch()
    if launch is not None and launch.by == "hand" and launch.nodes == 1:  # no variable has the number of nodes
        launch = replace(launch, nodes=settings["num_nodes"])
    plugins, nodes, devices = settings["plugins"], settings["num_nodes"], settings["devices"]
    if not any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        if launch is None and nodes > 1:
            raise BadInput("trainer.num_nodes", nodes, "1, unless torchrun, srun or mpirun starts the ranks")
        plugins = [*plugins, *_environment(launch)]
    if launch is not None:
        nodes = launch.nodes if nodes == 1 else nodes
        devices = launch.size // launch.nodes if devices == "auto" else devices
    return settings | {"plugins": plugins, "num_nodes": nodes, "devices": devices}


def _environment(launch: Launch | None) -> list[ClusterEnvironment]:
    if launch is None:
        return [] if environments.LSFEnvironment.detect() else [environments.LightningEnvironment()]
    if launch.by == "slurm":  # Lightning needs it, and `srun -n` does not set it
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(launch.size // launch.nodes))
    if launch.by == "hand":
        return [ByHand(max(launch.size // launch.nodes, 1))]
    return [_mpi(launch.size)] if launch.by == "mpi" else []


@lru_cache(1)
def _mpi(size: int) -> "MPI":
    """Return the environment under `mpirun -n SIZE`, made once, as MPI can be initialised only once."""
    try:
        return MPI()
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library for it
        why = "which is not there" if isinstance(error, ModuleNotFoundError) else f"and a library for it ({error})"
        expected = f"mpi4py, {why}; the extra [mpi] brings it: {extras.install_command('mpi')}"
        raise BadInput("", f"mpirun -n {size}", expected) from None


class ByHand(environments.TorchElasticEnvironment):
    """Torchrun's variables as the user sets them; those that follow from RANK and WORLD_SIZE may be missing."""

    def __init__(self, local_size: int) -> None:
        super().__init__()
        self._local_size = local_size  # ranks on each machine
        self.guesses = "LOCAL_RANK" not in os.environ

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", self.global_rank() % self._local_size))

    def node_rank(self) -> int:
        return int(os.environ.get("GROUP_RANK", self.global_rank() // self._local_size))


class MPI(environments.MPIEnvironment):
    """Gets ranks and an address from MPI, then finalises MPI; gloo or NCCL sends the tensors.

    With MPI still active a failing rank would wait in MPI_Finalize for the others, and no process could fork.
    """

    def __init__(self) -> None:
        from mpi4py import MPI as mpi  # noqa: N811

        super().__init__()
        hosts = mpi.COMM_WORLD.allgather(socket.gethostname())
        self._main_address = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"  # needs no name resolution
        self.listening: socket.socket | None = None
        if self.global_rank() == 0:
            self.listening = socket.socket()
            self.listening.listen(4096)  # at a free port, held from now on
        self._main_port = mpi.COMM_WORLD.bcast(self.listening.getsockname()[1] if self.listening else None)
        self.world_size(), self.local_rank(), self.node_rank()  # cached by Lightning's class
        mpi.Finalize()


def make_loggers(value: Any, run: str) -> list[Logger]:
    """Make the loggers of `trainer.logger`, with this name of their run unless the user set one.

    Raises:
        BadInput: a logger's package is missing, or its constructor refuses an option.
    """
    key = "trainer.logger"
    if isinstance(value, list):
        return [_make_logger(choice, f"{key}.{place}", run) for place, choice in enumerate(value)]
    return [] if isinstance(value, bool) else [_make_logger(value, key, run)]


def _make_logger(choice: cli.Choice, key: str, run: str) -> Logger:
    options = choice.signature
    name = next((name for name in NAMES if name in options.hints), None)
    if name is not None and choice.init_args[name] == options.defaults[name]:
        choice = replace(choice, init_args={**choice.init_args, name: run})
    logger: Logger = cli.build(choice, key)
    return logger


def finish_runs(loggers: Iterable[Logger]) -> None:
    """End this process's runs of Weights & Biases, as its next logger would continue an open one."""
    if any(type(logger).__name__ == "WandbLogger" for logger in loggers) and "wandb" in sys.modules:
        sys.modules["wandb"].finish()
