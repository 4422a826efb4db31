"""Measures cases of one backend, in ranks that are started for them and timed inside."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from apprentice.children import end_with_parent
from lab.strategies import ring
from lab.studies.comm.cases import WORLD, Backend, Case
from lab.studies.comm.operations import Member
from lab.studies.isolation import can_fork, children_end_with_block

WARMUP = 2  # calls: the first makes connections
MAX_CALLS = 200  # calls in a block


class MessageTiming(TypedDict):
    """A measured case."""

    name: str
    backend: str
    operation: str
    group: str
    ranks: int
    bytes: int
    correct: bool
    seconds: list[float]  # a call, of each block, by the slowest rank
    latency_us: float
    algorithm_gb_per_s: float | None  # None where nothing is sent
    bus_gb_per_s: float | None


@dataclass(frozen=True)
class Bench:
    """Measures the cases of a backend."""

    world_size: int  # ranks
    repeats: int  # blocks of calls that are timed; their median is reported
    timeout: float = 120.0  # seconds a rank may keep the others waiting
    block: float = 0.02  # seconds of calls that are timed together; one call where that takes longer

    def measure(self, backend: Backend, cases: Sequence[Case]) -> Iterator[MessageTiming | None]:
        """Yield None once the ranks have met, then each case's row when it is measured; raise what ends a rank."""
        context = multiprocessing.get_context("fork" if can_fork() else "spawn")
        receiver, sender = context.Pipe(duplex=False)
        with children_end_with_block(), tempfile.TemporaryDirectory() as folder:
            args = self, backend, cases, str(Path(folder) / "store"), sender
            method: Any = context.get_start_method()
            ranks: Any = start_processes(_rank, args=args, nprocs=self.world_size, join=False, start_method=method)
            for _ in range(1 + len(cases)):
                while not receiver.poll(0.02):
                    if ranks.join(timeout=0) and not receiver.poll():
                        raise RuntimeError("the ranks ended before all was measured")
                yield receiver.recv()
            while not ranks.join():
                pass


def _rank(rank: int, bench: Bench, backend: Backend, cases: Sequence[Case], store: str, sender: Any) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    ring.register()
    device = torch.device(backend.device, rank) if backend.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend.name, init_method=f"file://{store}", rank=rank, world_size=bench.world_size,
        timeout=timedelta(seconds=bench.timeout),
    )  # fmt: skip
    members = {}
    for name, ranks in {case.group: case.ranks for case in cases}.items():
        group = dist.group.WORLD if name == WORLD else dist.new_group(list(ranks))
        if rank in ranks:
            members[name] = Member(group, ranks, ranks.index(rank), device)
    dist.barrier()
    if rank == 0:
        sender.send(None)
    for case in cases:
        member = members.get(case.group)
        timings: list[Any] = [None] * bench.world_size
        dist.all_gather_object(timings, None if member is None else time_case(case, member, bench))
        if rank == 0:
            sender.send(_row(case, [timing for timing in timings if timing is not None]))
    dist.destroy_process_group()


def _row(case: Case, members: Sequence[tuple[bool, list[float]]]) -> MessageTiming:
    """Make the row from what `time_case` returns on all members."""
    blocks = [max(block) for block in zip(*(seconds for _, seconds in members), strict=True)]
    seconds = statistics.median(blocks)
    algorithm = case.size / seconds / 1e9 if case.count else None
    return {
        "name": case.name,
        "backend": case.backend.name,
        "operation": case.operation,
        "group": case.group,
        "ranks": len(case.ranks),
        "bytes": case.size,
        "correct": all(correct for correct, _ in members),
        "seconds": blocks,
        "latency_us": 1e6 * seconds,
        "algorithm_gb_per_s": algorithm,
        "bus_gb_per_s": None if algorithm is None else algorithm * case.definition.bus(len(case.ranks)),
    }


def time_case(case: Case, member: Member, bench: Bench) -> tuple[bool, list[float]]:
    """Return whether a first call's result is correct, and the seconds a call of each block."""
    operation = case.definition
    x, y = operation.tensors(member, case.count)
    run = operation.bind(member, x, y)
    run()
    correct = operation.is_correct(member, x, y)
    for buffer in (x, y):
        buffer.zero_()  # sums of sums stay finite
    for _ in range(WARMUP):
        run()
    calls = [int(min(max(bench.block / time_block(run, member, 1) * operation.trips, 1), MAX_CALLS))]
    dist.broadcast_object_list(calls, member.ranks[0], member.group)
    return correct, [time_block(run, member, calls[0]) / calls[0] / operation.trips for _ in range(bench.repeats)]


def time_block(run: Callable[[], object], member: Member, calls: int) -> float:
    """Return the seconds of so many calls in a row, after a barrier."""
    cuda = member.device.type == "cuda"
    dist.barrier(member.group)
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
