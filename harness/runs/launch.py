"""The launcher of this process (torchrun, SLURM, MPI or the user), its rank, and a store of values for all ranks."""

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch.distributed as dist
from lightning.pytorch import Trainer

from apprentice.errors import BadInput
from strategies import DataParallel
from strategies.base.private import default_store

POLL_SECONDS = 0.02
_written, _read = Counter[str](), Counter[str]()  # how often a key was set, and read

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# Launchers' variables for the rank, the number of ranks, of ranks on a machine, and of machines. The first launcher
# that fits counts: mpirun may run inside a SLURM job, and srun sets MPICH's variables too.
LAUNCHERS = {
    "torchrun": TORCHRUN,  # only with TORCHELASTIC_RUN_ID
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ""),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "", "SLURM_NNODES"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ""),
    "hand": TORCHRUN,
}


class Launch(NamedTuple):
    """The place of a process that a launcher started."""

    by: str  # "torchrun", "slurm", "mpi" or "hand"
    rank: int  # of this process
    size: int  # number of ranks
    nodes: int  # number of machines


def is_main_process() -> bool:
    """Return whether this process writes files: it is no rank but the first of a launcher or of Lightning."""
    ranks = [*(variables[0] for variables in LAUNCHERS.values()), "LOCAL_RANK"]
    return next((os.environ[name] for name in ranks if name in os.environ), "0") == "0"


def find_launch() -> Launch | None:
    """Return this process's place if a launcher started it; raise BadInput if the launcher's variables contradict."""
    interactive = os.environ.get("SLURM_JOB_NAME") in {"bash", "interactive"}
    for by, (rank, size, local_size, nodes) in LAUNCHERS.items():
        inactive = (by == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ) or (by == "slurm" and interactive)
        if inactive or not {rank, size} <= os.environ.keys():
            continue
        number, total = _number(rank), _number(size)
        if not 0 <= number < total:
            raise BadInput("", f"{rank} {number}", f"a number from 0 to {total - 1}, as {size} is {total}")
        local_total = max(_number(local_size) if local_size in os.environ else total, 1)
        machines = _number(nodes) if nodes in os.environ else total // local_total
        if total > 1 or by not in {"mpi", "mpich"}:
            return Launch("mpi" if by == "mpich" else by, number, total, max(machines, 1))
    return None


def _number(variable: str) -> int:
    value = os.environ[variable]
    if not value.isdecimal():
        raise BadInput("", f"{variable} {value}", "a number")
    return int(value)


def join(trainer: Trainer) -> None:
    """Join the other ranks if a launcher started them; otherwise each fit starts its own.

    Raises:
        BadInput: the Trainer has another number of devices than ranks were started.
        TimeoutError: rank 0 does not answer, or a rank is missing.
        ConnectionError: the port or the file can't be used, or a rank was started twice.
    """
    launch, strategy = find_launch(), trainer.strategy
    if launch is None:
        return
    if launch.size != trainer.num_devices * trainer.num_nodes:
        expected = f"{launch.size / trainer.num_nodes:g} on each of {trainer.num_nodes} nodes"
        raise BadInput("trainer.devices", trainer.num_devices, f"{expected}, as {launch.size} ranks were started")
    if strategy.launcher is not None:
        strategy.join() if isinstance(strategy, DataParallel) else strategy.setup_environment()


def torchrun_job(argv: Sequence[str]) -> str:
    """Return what identifies a torchrun job after a restart: its id and command line; "" under other launchers."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return "" if run_id is None else "\n".join([run_id, *argv])


def ranks() -> int:
    """Return the number of ranks that have joined; 1 before that."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def store_set(key: str, value: str) -> None:
    """Publish the next value of a key for the other ranks."""
    _written[key] += 1
    default_store().set(f"apprentice/{key}/{_written[key]}", value)


def store_get(key: str) -> str:
    """Wait for the next value of a key; raise ConnectionError if rank zero, which holds the store, has ended."""
    _read[key] += 1
    store, entry = default_store(), f"apprentice/{key}/{_read[key]}"
    try:
        while not store.check([entry]):
            time.sleep(POLL_SECONDS)  # a wait inside the store would block signals
        return store.get(entry).decode()
    except dist.DistError:
        raise ConnectionError("rank 0 has gone; its own message, if there is one, is above") from None


@contextmanager
def main_first(task: str) -> Iterator[None]:
    """Run the block, such as a download, on rank zero, then on the others; SystemExit there if rank zero failed."""
    outcome = "failed"
    if ranks() > 1 and dist.get_rank() == 0:
        try:
            yield
            outcome = "done"
        finally:
            store_set(task, outcome)
        return
    if ranks() > 1:
        with suppress(ConnectionError):
            outcome = store_get(task)
        if outcome == "failed":
            raise SystemExit(2)
    yield
