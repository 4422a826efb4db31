"""What has started this process: torchrun, SLURM, MPI, the user's own RANK and WORLD_SIZE, or nobody but the user."""

import os
import socket
from functools import lru_cache
from typing import Any, NamedTuple

from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    TorchElasticEnvironment,
)

from apprentice import extras
from harness.runs import job
from apprentice.errors import BadInput
from harness.runs.fit import MakeTrainer

INSTALL = extras.install("mpi")


class Started(BadInput):
    """Something about how this process was started that can't be used; it has no flag."""

    def __str__(self) -> str:
        return f"{self.value}: expected {self.expected}"


class Launch(NamedTuple):
    """A process among those that a launcher has started.

    Attributes:
        by: "torchrun", "slurm", "mpi" or "hand".
        rank: of this process.
        size: how many there are.
        nodes: on how many machines.
    """

    by: str
    rank: int
    size: int
    nodes: int


def launched() -> Launch | None:
    """Who started this process and the others; None where there are no others yet.

    Raises:
        Started: the variables contradict each other.
    """
    interactive = os.environ.get("SLURM_JOB_NAME") in {"bash", "interactive"}
    for by, (rank, size, _, here, machines) in job.LAUNCHERS.items():
        if by == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ:
            continue
        if rank not in os.environ or size not in os.environ or (by == "slurm" and interactive):
            continue
        mine, total = _number(rank), _number(size)
        if not 0 <= mine < total:
            raise Started("", f"{rank} {mine}", f"a number from 0 to {total - 1}, as {size} is {total}")
        if machines in os.environ:
            nodes = _number(machines)
        else:
            nodes = total // max(_number(here) if here in os.environ else total, 1)
        if total > 1 or by not in {"mpi", "mpich"}:
            return Launch("mpi" if by == "mpich" else by, mine, total, max(nodes, 1))
    return None


def _number(variable: str) -> int:
    value = os.environ[variable]
    if not value.isdecimal():
        raise Started("", f"{variable} {value}", "a number")
    return int(value)


def fitted(settings: dict[str, Any]) -> dict[str, Any]:
    """The Trainer's settings for what was started: its devices and nodes, where they are not given, and plugins.

    Raises:
        Started: what was started can't be used; `[mpi]` may not be installed.
    """
    launch = launched()
    if launch is not None and launch.by == "hand" and launch.nodes == 1:  # nobody has said on how many they are
        launch = launch._replace(nodes=settings["num_nodes"])
    environments = [plugin for plugin in settings["plugins"] if isinstance(plugin, ClusterEnvironment)]
    if not environments:
        settings = settings | {"plugins": [*settings["plugins"], *_environment(launch)]}
    if launch is None:
        if settings["num_nodes"] > 1 and not environments:
            raise BadInput(
                "trainer.num_nodes", settings["num_nodes"], "1, unless torchrun, srun or mpirun starts the ranks"
            )
        return settings
    if settings["num_nodes"] == 1:
        settings = settings | {"num_nodes": launch.nodes}
    if settings["devices"] == "auto":
        settings = settings | {"devices": launch.size // launch.nodes}
    return settings


def _environment(launch: Launch | None) -> list[ClusterEnvironment]:
    """Lightning's own choice but for MPI: with mpi4py there, it would start MPI to ask who is who."""
    if launch is None:
        return [] if LSFEnvironment.detect() else [LightningEnvironment()]
    if launch.by == "slurm":  # Lightning wants to know, and `srun -n` does not tell
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(launch.size // launch.nodes))
    if launch.by == "hand":
        return [ByHand(max(launch.size // launch.nodes, 1))]
    return [_mpi(launch.size)] if launch.by == "mpi" else []


class ByHand(TorchElasticEnvironment):
    """Torchrun's variables, set by the user, who may leave out those that follow from the others.

    Attributes:
        guesses: whether nobody has said which rank of this machine this is.

    Args:
        here: how many ranks there are on each machine.
    """

    def __init__(self, here: int) -> None:
        super().__init__()
        self._here, self.guesses = here, "LOCAL_RANK" not in os.environ

    def local_rank(self) -> int:
        """The rank's number on its machine."""
        return int(os.environ.get("LOCAL_RANK", self.global_rank() % self._here))

    def node_rank(self) -> int:
        """The machine's number."""
        return int(os.environ.get("GROUP_RANK", self.global_rank() // self._here))


@lru_cache(1)
def _mpi(size: int) -> "MPI":
    try:
        return MPI()
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no MPI library for it
        why = "which is not there" if isinstance(error, ModuleNotFoundError) else f"and a library for it ({error})"
        raise Started("", f"mpirun -n {size}", f"mpi4py, {why}; the extra [mpi] brings it: {INSTALL}") from None


class MPI(MPIEnvironment):
    """Lightning's environment, which asks MPI who is who; then it lets go of MPI.

    Else a rank that fails would wait for the others in MPI_Finalize, while they wait for it in training, and no process
    could be forked. The tensors are sent by gloo or NCCL.
    """

    def __init__(self) -> None:
        from mpi4py import MPI as mpi  # noqa: N811

        super().__init__()
        hosts = mpi.COMM_WORLD.allgather(socket.gethostname())
        self._main_address = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"  # which needs no name that resolves
        self.listening: socket.socket | None = None
        if self.global_rank() == 0:
            self.listening = socket.socket()
            self.listening.listen(4096)  # at a free port, which no other run can take from now on
        self._main_port = mpi.COMM_WORLD.bcast(self.listening.getsockname()[1] if self.listening else None)
        self.world_size(), self.local_rank(), self.node_rank()  # they are kept
        mpi.Finalize()


def join(make_trainer: MakeTrainer) -> None:
    """Meet the others where a launcher has started them; without one, ranks are started when they are needed.

    Raises:
        BadInput: the Trainer has another number of devices than were started.
        TimeoutError: nobody answers, or someone has not come.
        ConnectionError: the port or the file can't be used, or a rank is there twice.
    """
    trainer, launch = make_trainer(), launched()
    strategy: Any = trainer.strategy
    if launch is not None and launch.size != trainer.num_devices * trainer.num_nodes:
        each = f"{launch.size / trainer.num_nodes:g} on each of {trainer.num_nodes} nodes"
        raise BadInput("trainer.devices", trainer.num_devices, f"{each}, as {launch.size} ranks were started")
    if launch is not None and strategy.launcher is not None:
        getattr(strategy, "join", strategy.setup_environment)()
