"""Which rank of a job this process is, and what ranks tell each other outside training, by the store they met in."""

import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PAUSE = 0.02  # seconds between two looks
_said, _heard = Counter[str](), Counter[str]()  # how often under each key


class Variables(NamedTuple):
    """By which a launcher tells a process of the rank, of how many there are, of both on this machine, of machines."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    nodes: str


TORCHRUN = Variables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# One may run inside another, mpirun in a job of SLURM's; srun sets MPICH's variables, too.
LAUNCHERS = {
    "torchrun": TORCHRUN,  # only with TORCHELASTIC_RUN_ID
    "mpi": Variables(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""
    ),
    "slurm": Variables("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NNODES"),
    "mpich": Variables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""),
    "hand": TORCHRUN,
}


def is_main_process() -> bool:
    """Whether this process is the one that starts and writes: not a rank that a launcher or Lightning started."""
    return _first([*(variables.rank for variables in LAUNCHERS.values()), "LOCAL_RANK"]) == "0"


def is_local_rank_zero() -> bool:
    """Whether this process tells what all ranks find wrong: the first on each machine does."""
    return _first([variables.local_rank for variables in LAUNCHERS.values()]) == "0"


def _first(names: Iterable[str]) -> str:
    return next((os.environ[name] for name in names if name in os.environ), "0")


def ranks() -> int:
    """How many ranks have met so far; 1 before."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def store_set(key: str, value: str) -> None:
    """Leave something for the other ranks; what is told again under a key is another thing."""
    _said[key] += 1
    _get_default_store().set(f"apprentice/{key}/{_said[key]}", value)


def store_get(key: str) -> str:
    """What another rank has left, as soon as it is there; asked again, the next thing.

    Raises:
        ConnectionError: rank zero, which keeps it, has gone.
    """
    _heard[key] += 1
    store, entry = _get_default_store(), f"apprentice/{key}/{_heard[key]}"
    try:
        while not store.check([entry]):
            time.sleep(PAUSE)  # not in the store, where no signal is heard
        return store.get(entry).decode()
    except dist.DistError:
        raise ConnectionError("rank 0 has gone; its own message, if there is one, is above") from None


@contextmanager
def main_first(task: str) -> Iterator[None]:
    """Where ranks have met, rank zero runs the block before the others do: it downloads, or clears a folder, once.

    Raises:
        SystemExit: rank zero has failed, and has said why.
    """
    if ranks() == 1:
        yield
        return
    if dist.get_rank() == 0:
        try:
            yield
        except BaseException:
            store_set(task, "failed")
            raise
        store_set(task, "done")
        return
    try:
        failed = store_get(task) == "failed"
    except ConnectionError:
        failed = True
    if failed:
        raise SystemExit(2)
    yield


def agents() -> set[str]:
    """The agents of torchrun that have started the ranks, one on each machine; none where it has not.

    An agent serves one job and starts its ranks again and again. So where one of them has been before, it is that job.
    """
    mine = _agent() if "TORCHELASTIC_RUN_ID" in os.environ else ""
    if ranks() > 1:
        store_set(f"agent/{dist.get_rank()}", mine)
        found = {store_get(f"agent/{rank}") for rank in range(ranks())}
    else:
        found = {mine}
    return found - {""}


def _agent() -> str:
    """Machine, number and start of the process that has started this one: no other has all three."""
    stat = Path(f"/proc/{os.getppid()}/stat")
    started = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    return f"{socket.gethostname()} {os.getppid()} {started}"
