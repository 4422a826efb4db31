"""Which launcher started this process (torchrun, SLURM, MPI or the user), its rank, and what ranks tell each other."""

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
_written, _read = Counter[str](), Counter[str]()  # how often each key was set and got


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# The variables by which a launcher tells a process its rank, their number, that on each machine, and that of machines.
# The first that fits counts: mpirun may run inside a SLURM job, and srun sets MPICH's variables too.
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
    """Whether this process writes files: not so for the other ranks of a launcher's or Lightning's."""
    ranks = [*(variables[0] for variables in LAUNCHERS.values()), "LOCAL_RANK"]
    return next((os.environ[name] for name in ranks if name in os.environ), "0") == "0"


def launched() -> Launch | None:
    """This process's place if a launcher started it; BadInput if the launcher's variables contradict each other."""
    interactive = os.environ.get("SLURM_JOB_NAME") in {"bash", "interactive"}
    for by, (rank, size, local_size, nodes) in LAUNCHERS.items():
        other = (by == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ) or (by == "slurm" and interactive)
        if other or not {rank, size} <= os.environ.keys():
            continue
        mine, total = _number(rank), _number(size)
        if not 0 <= mine < total:
            raise BadInput("", f"{rank} {mine}", f"a number from 0 to {total - 1}, as {size} is {total}")
        each = max(_number(local_size) if local_size in os.environ else total, 1)
        machines = _number(nodes) if nodes in os.environ else total // each
        if total > 1 or by not in {"mpi", "mpich"}:
            return Launch("mpi" if by == "mpich" else by, mine, total, max(machines, 1))
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


def ranks() -> int:
    """Number of ranks that have joined; 1 before that."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def store_set(key: str, value: str) -> None:
    """Publish a value for the other ranks, or the next value of a key."""
    _written[key] += 1
    default_store().set(f"apprentice/{key}/{_written[key]}", value)


def store_get(key: str) -> str:
    """Wait for a key's next value from another rank; ConnectionError if rank zero, which holds it, has ended."""
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
