"""Measures rows of one backend, in ranks that are started for them and timed inside."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from harness.studies.comm.operations import Case, Place
from harness.studies.comm.rows import SUB, WORLD, Backend, Row
from harness.studies.isolation import can_fork, none_left

Facts = dict[str, Any]
WARMUP = 2  # calls: the first makes connections
MOST = 200  # calls in a block


class NeverMetError(RuntimeError):
    """The ranks never met.

    Args:
        why: what ended one of them.
    """

    def __init__(self, why: Exception) -> None:
        super().__init__(f"the ranks never met: {why}")
        self.why = why


@dataclass(frozen=True)
class Bench:
    """Measures.

    Attributes:
        world_size: ranks.
        repeats: blocks of calls that are timed; told is their median.
        register: makes backends known to torch, in each rank.
        timeout: seconds a rank may keep the others waiting.
        block: seconds of calls that are timed together; one call where that takes longer.
    """

    world_size: int
    repeats: int
    register: Callable[[], None]
    timeout: float = 120.0
    block: float = 0.02

    def measure(self, backend: Backend, rows: Sequence[Row]) -> Iterator[tuple[Row, Facts]]:
        """What results.json has of each row, as soon as it is there.

        Raises:
            NeverMetError: the ranks never met.
            Exception: a rank failed, at the row after the last that is there.
        """
        context = multiprocessing.get_context("fork" if can_fork() else "spawn")
        receiver, sender = context.Pipe(duplex=False)
        with none_left(), tempfile.TemporaryDirectory() as folder:
            call = (self, backend, rows, str(Path(folder) / "store"), sender)
            method: Any = context.get_start_method()
            ranks: Any = start_processes(_rank, args=call, nprocs=self.world_size, join=False, start_method=method)

            def received(before: str) -> Any:
                while not receiver.poll(0.02):
                    if ranks.join(timeout=0) and not receiver.poll():
                        raise RuntimeError(f"the ranks ended before {before}")
                return receiver.recv()

            try:
                received("they met")
            except Exception as error:
                raise NeverMetError(error) from error
            for row in rows:
                yield row, received(row.name)
            while not ranks.join():
                pass


def _rank(rank: int, bench: Bench, backend: Backend, rows: Sequence[Row], store: str, sender: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    bench.register()
    device = torch.device(backend.device, rank) if backend.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend.name, init_method=f"file://{store}", rank=rank, world_size=bench.world_size,
        timeout=timedelta(seconds=bench.timeout),
    )  # fmt: skip
    places = places_of(rows, rank, device)
    dist.barrier()
    if rank == 0:
        sender.send(None)
    for row in rows:
        facts = _measured(row, places[row.group], bench)
        if facts is not None:
            sender.send(facts)
    dist.destroy_process_group()


def places_of(rows: Sequence[Row], rank: int, device: torch.device) -> dict[str, Place | None]:
    """This rank's in each group; None where it is no member."""
    groups: dict[str, Any] = {WORLD: dist.group.WORLD}
    members = {row.group: row.ranks for row in rows}
    if SUB in members:
        groups[SUB] = dist.new_group(list(members[SUB]))
    return {
        name: Place(groups[name], ranks, ranks.index(rank), device) if rank in ranks else None
        for name, ranks in members.items()
    }


def _measured(row: Row, place: Place | None, bench: Bench) -> Facts | None:
    """On the world's first rank what was found of a row; the others have told it theirs."""
    mine = None if place is None else timed(row, place, bench)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    there = [each for each in found if each is not None]
    if dist.get_rank():
        return None
    blocks = [max(each) for each in zip(*(seconds for _, seconds in there), strict=True)]
    seconds = statistics.median(blocks)
    algorithm = row.size / seconds / 1e9 if row.count else None
    return {
        "name": row.name,
        "backend": row.backend.name,
        "operation": row.operation,
        "group": row.group,
        "ranks": len(row.ranks),
        "bytes": row.size,
        "correct": all(right for right, _ in there),
        "seconds": blocks,
        "latency_us": 1e6 * seconds,
        "algorithm_gb_per_s": algorithm,
        "bus_gb_per_s": None if algorithm is None else algorithm * row.of.bus(len(row.ranks)),
    }


def timed(row: Row, place: Place, bench: Bench) -> tuple[bool, list[float]]:
    """Whether a first call gave what it has to; seconds a call, of each block."""
    case = row.of.make(place, row.count)
    case.run()
    right = case.is_right()
    for x in case.buffers:
        x.zero_()  # what is summed up over and over stays finite
    calls = warmed_up(case, place, bench.block)
    return right, [block(case, place, calls) for _ in range(bench.repeats)]


def warmed_up(case: Case, place: Place, seconds: float) -> int:
    """How many calls take so long together, the same on all ranks."""
    for _ in range(WARMUP):
        case.run()
    told = [int(min(max(seconds / block(case, place, 1), 1), MOST))]
    dist.broadcast_object_list(told, place.ranks[0], place.group)
    return told[0]


def block(case: Case, place: Place, calls: int) -> float:
    """Seconds a call, of so many in a row, from the moment at which all ranks are there."""
    cuda = place.device.type == "cuda"
    dist.barrier(place.group)
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        case.run()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls / case.trips
