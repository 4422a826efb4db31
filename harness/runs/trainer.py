"""Trainers as the command line describes them, each with parts of its own, on the ranks of whatever launcher."""

import inspect
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.plugins import environments
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from apprentice import extras
from apprentice.errors import BadInput
from harness import cli
from harness.runs import environment
from harness.runs.launch import Launch, launched
from harness.runs.progress import Show

# With the user's settings; takes callbacks, logger and plugins by keyword, and `show` as `trainers` has it.
MakeTrainer = Callable[..., Trainer]
REFUSALS = (ValueError, TypeError, RuntimeError, ImportError, MisconfigurationException)  # of options by the Trainer


def trainers(chosen: cli.Choice, exact: int | None, strategies: cli.Names) -> MakeTrainer:
    """What makes Trainers; it takes their arguments by keyword, `callbacks` and `plugins` on top of the user's.

    It also takes `show`, of type `progress.Show`. A user who chooses a progress bar of Lightning's gets that instead.

    `chosen` and `strategies` are of `cli.Parser`; the strategy named ddp serves `--exact` where none is chosen.

    Raises:
        BadInput: a strategy or precision that does not support `--exact`; when called, what Lightning refuses.
    """
    if exact is None:
        return partial(_trainer, chosen)
    strategy, family = chosen.init_args["strategy"], cli.Strategies(names=strategies)
    if strategy == "auto":
        strategy = family.choose("ddp")
    if not family.exact(strategy):
        holding = ", ".join(name for name in family.names if family.exact(family.choose(name)))
        raise BadInput("exact", exact, f"a strategy that can hold it: {holding}; {family.label(strategy)} can't")
    if str(chosen.init_args.get("precision")) in {"16", "16-mixed"}:
        raise BadInput("exact", exact, "--trainer.precision other than 16-mixed, whose loss scale it can't hold")
    strategy = replace(strategy, init_args={**strategy.init_args, "exact": exact})
    return partial(_trainer, replace(chosen, init_args={**chosen.init_args, "strategy": strategy}))


def _trainer(
    chosen: cli.Choice,
    callbacks: Sequence[Any] = (),
    plugins: Sequence[Any] = (),
    show: Show | None = None,
    **own: Any,
) -> Trainer:
    chosen = replace(chosen, init_args={**chosen.init_args, "logger": False})  # those of a fit are given
    settings = cli.arguments(chosen, "trainer")
    settings |= {name: settings[name] or 0 for name in ("enable_model_summary", "num_sanity_val_steps")} | own
    if settings["accelerator"] == "auto" and torch.backends.mps.is_available():
        settings["accelerator"] = "cpu"  # evaluation adds in float64, which Apple's GPUs don't have
    for name, more in (("callbacks", callbacks), ("plugins", plugins)):
        given = settings[name] or []
        settings[name] = [*(given if isinstance(given, list) else [given]), *more]
    if settings.get("enable_checkpointing") is False:
        settings["callbacks"] = [each for each in settings["callbacks"] if not isinstance(each, Checkpoint)]
    asked, bars = settings["enable_progress_bar"], [c for c in settings["callbacks"] if isinstance(c, ProgressBar)]
    settings["enable_progress_bar"] = bool(bars or (show and asked))
    if show and not settings["enable_progress_bar"]:
        settings["callbacks"].append(show(asked is None))
    settings = with_launcher(settings)
    try:
        with cli.refusals(chosen, "trainer", REFUSALS):
            made = Trainer(**settings)
    except BadInput as error:
        if error.flag != "trainer":
            flag = error.flag.replace("trainer.strategy.exact", "exact")
            raise BadInput(flag, error.value, error.expected) from error
        wanted = f"what Lightning takes on this machine: {error.__cause__}"
        raise BadInput(*_at_fault(chosen, settings), wanted) from None
    if made.strategy.root_device.type == "cpu":
        environment.hide_gpus()
    return made


def _at_fault(chosen: cli.Choice, settings: dict[str, Any]) -> tuple[str, Any]:
    """The first option, with its value, without which the Trainer could be made; else the machine's."""
    defaults = inspect.signature(Trainer).parameters
    for name, value in chosen.init_args.items():
        if value != (default := defaults[name].default):
            with suppress(*REFUSALS):
                Trainer(**{**settings, name: default})
                return f"trainer.{name}", getattr(value, "name", value)
    return "trainer.accelerator", f"{settings['accelerator']} --trainer.devices {settings['devices']}"


def with_launcher(settings: dict[str, Any]) -> dict[str, Any]:
    """The Trainer's settings with the launcher's cluster environment, and its devices and nodes if none are given."""
    launch = launched()
    if launch is not None and launch.by == "hand" and launch.nodes == 1:  # no variable tells the number of nodes
        launch = launch._replace(nodes=settings["num_nodes"])
    found, nodes, devices = settings["plugins"], settings["num_nodes"], settings["devices"]
    if not any(isinstance(plugin, ClusterEnvironment) for plugin in found):
        if launch is None and nodes > 1:
            raise BadInput("trainer.num_nodes", nodes, "1, unless torchrun, srun or mpirun starts the ranks")
        found = [*found, *_environment(launch)]
    if launch is not None:
        nodes = launch.nodes if nodes == 1 else nodes
        devices = launch.size // launch.nodes if devices == "auto" else devices
    return settings | {"plugins": found, "num_nodes": nodes, "devices": devices}


def _environment(launch: Launch | None) -> list[ClusterEnvironment]:
    if launch is None:
        return [] if environments.LSFEnvironment.detect() else [environments.LightningEnvironment()]
    if launch.by == "slurm":  # Lightning asks for it, and `srun -n` does not set it
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(launch.size // launch.nodes))
    if launch.by == "hand":
        return [ByHand(max(launch.size // launch.nodes, 1))]
    return [_mpi(launch.size)] if launch.by == "mpi" else []


@lru_cache(1)
def _mpi(size: int) -> "MPI":
    """The environment under `mpirun -n SIZE`, made once, as MPI can be asked only once."""
    try:
        return MPI()
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library for it
        why = "which is not there" if isinstance(error, ModuleNotFoundError) else f"and a library for it ({error})"
        expected = f"mpi4py, {why}; the extra [mpi] brings it: {extras.install('mpi')}"
        raise BadInput("", f"mpirun -n {size}", expected) from None


class ByHand(environments.TorchElasticEnvironment):
    """Torchrun's variables, set by the user, who may leave out those that follow from RANK and WORLD_SIZE."""

    def __init__(self, local_size: int) -> None:
        super().__init__()
        self._local_size = local_size  # ranks on each machine
        self.guesses = "LOCAL_RANK" not in os.environ

    def local_rank(self) -> int:
        """The rank's number on its machine."""
        return int(os.environ.get("LOCAL_RANK", self.global_rank() % self._local_size))

    def node_rank(self) -> int:
        """The machine's number."""
        return int(os.environ.get("GROUP_RANK", self.global_rank() // self._local_size))


class MPI(environments.MPIEnvironment):
    """Asks MPI for the ranks and an address, then finalises MPI; gloo or NCCL sends the tensors.

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
