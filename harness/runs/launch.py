"""The ranks that a launcher started (torchrun, SLURM, MPI or the user): how they join, and values for all of them."""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch.distributed as dist
from lightning.pytorch import Trainer

from apprentice.errors import BadInput
from harness.ranks import Launch, find_launch, is_main_process
from strategies import DataParallel
from strategies.base.private import default_store

__all__ = [
    "Launch", "find_launch", "is_main_process", "join", "main_first", "ranks", "store_get", "store_set", "torchrun_job",
]  # fmt: skip
POLL_SECONDS = 0.02
_written, _read = Counter[str](), Counter[str]()  # how often a key was set, and read
PATIENCE = 4.0, 10.0  # seconds until rank 0, and another, say that they wait


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
        with _say_if_waiting(launch):
            strategy.join() if isinstance(strategy, DataParallel) else strategy.setup_environment()


@contextmanager
def _say_if_waiting(launch: Launch) -> Iterator[None]:
    """Say on stderr whom this rank waits for, if the block takes longer than ranks usually differ by."""
    names, others = launch.variables, launch.size - 1
    line = f"waiting for {others} other process{'es' * (others > 1)}: this is {launch}"
    alone = f"one process alone needs no launcher: `unset {names.rank} {names.size}`"
    timer = threading.Timer(PATIENCE[launch.rank > 0], sys.stderr.write, [f"{line}; {alone}\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
