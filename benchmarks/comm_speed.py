"""How fast our ring is beside gloo's own all-reduce, and what comm.py's way to measure adds, as ratios in one run.

    python benchmarks/comm_speed.py                  # a minute on 2 cores
    python benchmarks/comm_speed.py --quick          # seconds: a small size, whose figures say nothing

ring: an all-reduce of 16 MB by `ring`, and by the tutorial's unchunked ring, over that by gloo, on 2 and 3 processes.
comm.py: what it measures of gloo over a bare loop of the same calls, at several sizes, on 2 processes.

Rivals take turns in the same ranks. Ends with exit code 1 where a target is missed.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import common
from benchmarks.common import Measurement, Runs, Target
from harness.runs import environment
from lab.strategies import ring
from lab.studies.comm import Backend, Bench, Case
from lab.studies.comm.cases import WORLD
from lab.studies.comm.measure import time_case
from lab.studies.comm.operations import ITEM, Member

MB = 2**20
SIZES = (2**10, 2**16, MB, 16 * MB)
PAIRS = 5  # of comm.py's measurement and a bare loop, per round
TARGETS = {
    **{f"{ring.NAME}, {n} processes": Target(f"{ring.NAME} over gloo, {n} processes", high=2.0) for n in (2, 3)},
    **{f"{ring.UNCHUNKED}, {n} processes": Target(f"{ring.UNCHUNKED} over gloo, {n} processes") for n in (2, 3)},
    **{f"comm.py at {n:,} bytes": Target(f"comm.py over a bare loop at {n:,} bytes", 0.9, 1.1) for n in SIZES},
}


def slowest(seconds: float) -> float:
    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def call_seconds(x: torch.Tensor, calls: int, group: Any = None) -> float:
    """Return the seconds of an all-reduce, from a loop of calls."""
    dist.barrier(group)
    return slowest(common.seconds(lambda: [dist.all_reduce(x, group=group) for _ in range(calls)]) / calls)


def rings(size: int, rounds: int, calls: int) -> Runs:
    ring.register()
    groups: dict[str, Any] = {name: dist.new_group(backend=name) for name in ("gloo", ring.NAME, ring.UNCHUNKED)}
    for name, group in groups.items():
        x = torch.full((size // ITEM,), 2.0 ** dist.get_rank())
        dist.all_reduce(x, group=group)
        assert x.eq(2 ** dist.get_world_size() - 1).all(), name
    x = torch.zeros(size // ITEM)
    runs = common.take_turns({name: partial(call_seconds, x, calls, group) for name, group in groups.items()}, rounds)
    gloo = runs.pop("gloo")
    return {f"{name}, {dist.get_world_size()} processes": common.over(seconds, gloo) for name, seconds in runs.items()}


def measurements(sizes: Sequence[int], rounds: int) -> Runs:
    """Measure what comm.py does, over a bare loop, at each size."""
    member, ratios = Member(None, range(2), dist.get_rank(), common.CPU), Runs()

    def ours(count: int) -> float:
        _, (seconds,) = time_case(Case(Backend("gloo"), "all_reduce_sum", WORLD, (0, 1), count), member, Bench(2, 1))
        return slowest(seconds)

    def bare(x: torch.Tensor) -> float:
        call_seconds(x, 3)  # warm-up
        return call_seconds(x, min(max(4 * MB // x.nbytes, 3), 100))

    for size in sizes:
        rivals = {"ours": partial(ours, size // ITEM), "bare": partial(bare, torch.zeros(size // ITEM))}
        runs = common.take_turns(rivals, rounds * PAIRS)
        ratios[f"comm.py at {size:,} bytes"] = common.over(runs["ours"], runs["bare"])
    return ratios


def measure(args: argparse.Namespace) -> Measurement:
    environment.keep_memory()
    common.one_thread()
    size, sizes = (64 * 2**10, SIZES[:1]) if args.quick else (16 * MB, SIZES)
    two, three = (common.run_in_ranks(count, partial(rings, size, args.rounds, args.calls))[0] for count in (2, 3))
    return Measurement({}, two | three | common.run_in_ranks(2, partial(measurements, sizes, args.rounds))[0])


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--rounds", 15), "in which rivals take turns")
    command.add_argument("--calls", type=int, default=5, help="of an all-reduce in a round of a ring")
    command.add_argument("--quick", action="store_true", help="a small size and one round, to see that it runs")
    args = command.parse_args(argv)
    if args.quick:
        args.rounds, args.calls = 1, 2
    common.run(args, measure, TARGETS, strict=not args.quick)


if __name__ == "__main__":
    main()
