"""Which launcher started this process (torchrun, SLURM, MPI or the user), its rank, and what ranks tell each other."""

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, LSFEnvironment
from torch.distributed.distributed_c10d import _get_default_store

from apprentice.errors import BadInput
from harness.runs.clusters import ByHand, mpi
from strategies import DataParallel

POLL_SECONDS = 0.02
_written, _read = Counter[str](), Counter[str]()  # how often each key was set and got


class Variables(NamedTuple):
    """Environment variables by which a launcher tells a process its place."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    nodes: str


TORCHRUN = Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# The first that fits counts: mpirun may run inside a SLURM job, and srun sets MPICH's variables too.
LAUNCHERS = {
    "torchrun": TORCHRUN,  # only with TORCHELASTIC_RUN_ID
    "mpi": Variables(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""
    ),
    "slurm": Variables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NNODES"),
    "mpich": Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    "hand": TORCHRUN,
}


class Launch(NamedTuple):
    """The place of a process that a launcher started.

    Attributes:
        by: "torchrun", "slurm", "mpi" or "hand".
        rank: of this process.
        size: number of ranks.
        nodes: number of machines.
    """

    by: str
    rank: int
    size: int
    nodes: int


def is_main_process() -> bool:
    """Whether this process writes files: not so for the other ranks of a launcher's or Lightning's."""
    return _first([*(variables.rank for variables in LAUNCHERS.values()), "LOCAL_RANK"]) == "0"


def _first(names: Iterable[str]) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "0")


def launched() -> Launch | None:
    """This process's place among those that a launcher started; None without a launcher.

    Raises:
        BadInput: the variables contradict each other.
    """
    interactive = os.environ.get("SLURM_JOB_NAME") in {"bash", "interactive"}
    for by, (rank, size, _, local_size, nodes) in LAUNCHERS.items():
        if by == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ:
            continue
        if rank not in os.environ or size not in os.environ or (by == "slurm" and interactive):
            continue
        mine, total = _number(rank), _number(size)
        if not 0 <= mine < total:
            raise BadInput("", f"{rank} {mine}", f"a number from 0 to {total - 1}, as {size} is {total}")
        if nodes in os.environ:
            machines = _number(nodes)
        else:
            machines = total // max(_number(local_size) if local_size in os.environ else total, 1)
        if total > 1 or by not in {"mpi", "mpich"}:
            return Launch("mpi" if by == "mpich" else by, mine, total, max(machines, 1))
    return None


def _number(variable: str) -> int:
    value = os.environ[variable]
    if not value.isdecimal():
        raise BadInput("", f"{variable} {value}", "a number")
    return int(value)


def with_launcher(settings: dict[str, Any]) -> dict[str, Any]:
    """The Trainer's settings with the launcher's devices and nodes, where none are given, and its cluster environment.

    Raises:
        BadInput: the launch can't be used, such as mpirun without mpi4py.
    """
    launch = launched()
    if launch is not None and launch.by == "hand" and launch.nodes == 1:  # no variable tells the number of nodes
        launch = launch._replace(nodes=settings["num_nodes"])
    environments = [plugin for plugin in settings["plugins"] if isinstance(plugin, ClusterEnvironment)]
    if not environments:
        settings = settings | {"plugins": [*settings["plugins"], *_environment(launch)]}
    if launch is None:
        if settings["num_nodes"] > 1 and not environments:
            expected = "1, unless torchrun, srun or mpirun starts the ranks"
            raise BadInput("trainer.num_nodes", settings["num_nodes"], expected)
        return settings
    if settings["num_nodes"] == 1:
        settings = settings | {"num_nodes": launch.nodes}
    if settings["devices"] == "auto":
        settings = settings | {"devices": launch.size // launch.nodes}
    return settings


def _environment(launch: Launch | None) -> list[ClusterEnvironment]:
    if launch is None:
        return [] if LSFEnvironment.detect() else [LightningEnvironment()]
    if launch.by == "slurm":  # Lightning asks for it, and `srun -n` does not set it
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(launch.size // launch.nodes))
    if launch.by == "hand":
        return [ByHand(max(launch.size // launch.nodes, 1))]
    return [mpi(launch.size)] if launch.by == "mpi" else []


def join(trainer: Trainer) -> None:
    """Join the other ranks if a launcher started them; otherwise each fit starts its own.

    Raises:
        BadInput: the Trainer has another number of devices than ranks were started.
        TimeoutError: rank 0 does not answer, or a rank is missing.
        ConnectionError: the port or the file can't be used, or a rank was started twice.
    """
    launch, strategy = launched(), trainer.strategy
    if launch is None:
        return
    if launch.size != trainer.num_devices * trainer.num_nodes:
        each = f"{launch.size / trainer.num_nodes:g} on each of {trainer.num_nodes} nodes"
        raise BadInput("trainer.devices", trainer.num_devices, f"{each}, as {launch.size} ranks were started")
    if strategy.launcher is not None:
        strategy.join() if isinstance(strategy, DataParallel) else strategy.setup_environment()


def torchrun_job(argv: Sequence[str]) -> str:
    """What identifies a torchrun job after a restart: its id and its command line; "" under other launchers."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return "" if run_id is None else "\n".join([run_id, *argv])


def is_restart_of(job: str) -> bool:
    """Whether this process may belong to that torchrun job. Jobs without --rdzv_id share the id "none" at first."""
    run_id = job.partition("\n")[0]
    return run_id not in {"", "none"} or (run_id == "none" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0")


def ranks() -> int:
    """Number of ranks that have joined; 1 before that."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def store_set(key: str, value: str) -> None:
    """Publish a value for the other ranks; setting a key again publishes the next value."""
    _written[key] += 1
    _get_default_store().set(f"apprentice/{key}/{_written[key]}", value)


def store_get(key: str) -> str:
    """Wait for a value that another rank publishes; getting a key again waits for the next value.

    Raises:
        ConnectionError: rank zero, which holds the store, has ended.
    """
    _read[key] += 1
    store, entry = _get_default_store(), f"apprentice/{key}/{_read[key]}"
    try:
        while not store.check([entry]):
            time.sleep(POLL_SECONDS)  # a wait inside the store would block signals
        return store.get(entry).decode()
    except dist.DistError:
        raise ConnectionError("rank 0 has gone; its own message, if there is one, is above") from None


@contextmanager
def main_first(task: str) -> Iterator[None]:
    """Run the block on rank zero first, such as a download; the other ranks wait and run it then.

    Raises:
        SystemExit: rank zero failed and printed why.
    """
    if ranks() == 1:
        yield
        return
    outcome = "failed"
    if dist.get_rank() == 0:
        try:
            yield
            outcome = "done"
        finally:
            store_set(task, outcome)
        return
    with suppress(ConnectionError):
        outcome = store_get(task)
    if outcome == "failed":
        raise SystemExit(2)
    yield
