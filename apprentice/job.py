"""What the ranks of one job tell each other outside training: through the store in which they have met."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PAUSE = 0.02  # seconds between two looks


def speaks() -> bool:
    """Whether this process tells what all ranks find wrong: the first on each machine does."""
    variables = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
    return next((os.environ[name] for name in variables if name in os.environ), "0") == "0"


def ranks() -> int:
    """How many ranks have met so far; 1 before."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def tell(key: str, value: str) -> None:
    """Leave something for the other ranks, once a job."""
    _get_default_store().set(f"apprentice/{key}", value)


def told(key: str) -> str:
    """What another rank has left, as soon as it is there.

    Raises:
        ConnectionError: rank zero, which keeps it, has gone.
    """
    store = _get_default_store()
    try:
        while not store.check([f"apprentice/{key}"]):
            time.sleep(PAUSE)  # not in the store, where no signal is heard
        return store.get(f"apprentice/{key}").decode()
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
            tell(task, "failed")
            raise
        tell(task, "done")
        return
    try:
        failed = told(task) == "failed"
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
        tell(f"agent/{dist.get_rank()}", mine)
        found = {told(f"agent/{rank}") for rank in range(ranks())}
    else:
        found = {mine}
    return found - {""}


def _agent() -> str:
    """Machine, number and start of the process that has started this one: no other has all three."""
    stat = Path(f"/proc/{os.getppid()}/stat")
    started = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    return f"{socket.gethostname()} {os.getppid()} {started}"
