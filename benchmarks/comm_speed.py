"""How fast our ring is beside gloo's own all-reduce, and what comm.py's way to measure adds, as ratios in one run.

    python benchmarks/comm_speed.py                  # a minute on 2 cores
    python benchmarks/comm_speed.py --quick          # seconds: a small size, whose figures say nothing

ring: an all-reduce of 16 MB by `ring`, and by the tutorial's unchunked ring, over that by gloo, on 2 and 3 processes.
figures: what comm.py tells of gloo over a bare loop of the same calls, at several sizes, on 2 processes.

Rivals take turns in the same ranks: a ratio is of one round, and told is the median. It ends with exit code 1 where a
target is missed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from harness.runs import environment
from harness.studies.comm import Backend, Bench, Case
from harness.studies.comm.cases import WORLD
from harness.studies.comm.measure import block, timed
from harness.studies.comm.operations import ITEM, OPERATIONS, Member
from harness.studies.isolation import children_end_with_block
from strategies import ring

MB = 2**20
PAIRS = 5  # of what comm.py tells and a bare loop, in a round
Found = dict[str, list[float]]  # ratios, one a round, by what is compared


def in_ranks(size: int, part: Callable[..., Found], *args: Any) -> Found:
    """What rank zero finds."""
    with tempfile.TemporaryDirectory() as folder, children_end_with_block():
        start_processes(_rank, args=(size, folder, part, args), nprocs=size, start_method="fork")
        return json.loads((Path(folder) / "found").read_text())


def _rank(rank: int, size: int, folder: str, part: Callable[..., Found], args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    ring.register()
    store, timeout = f"file://{folder}/store", timedelta(seconds=120)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=timeout)
    found = part(*args)
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps(found))
    dist.destroy_process_group()


def place(group: Any) -> Member:
    """This rank's in a group of all."""
    return Member(group, range(dist.get_world_size()), dist.get_rank(), torch.device("cpu"))


def slowest(seconds: float) -> float:
    """The same on all ranks."""
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return told.item()


def rings(size: int, rounds: int, calls: int) -> Found:
    """Seconds of an all-reduce of so many bytes, over gloo's."""
    names = {"gloo": None, ring.NAME: ring.NAME, ring.UNCHUNKED: ring.UNCHUNKED}
    places = {name: place(dist.new_group(backend=backend) if backend else None) for name, backend in names.items()}
    cases = {name: OPERATIONS["all_reduce_sum"].make(place, size // ITEM) for name, place in places.items()}
    for case in cases.values():
        case.run()
        assert case.is_correct()
        case.buffers[0].zero_()
    found: Found = {ring.NAME: [], ring.UNCHUNKED: []}
    for number in range(rounds):
        order = list(cases.items())[:: 1 if number % 2 else -1]  # the first is now and then the slower
        seconds = {name: slowest(block(case, places[name], calls)) for name, case in order}
        for name, ratios in found.items():
            ratios.append(seconds[name] / seconds["gloo"])
    return found


def figures(sizes: Sequence[int], rounds: int) -> Found:
    """Seconds that comm.py finds over those of a bare loop, for each size; they take turns."""
    bench, found = Bench(2, 1), {}
    for size in sizes:
        row = Case(Backend("gloo"), "all_reduce_sum", WORLD, (0, 1), size // ITEM)
        both = [partial(_ours, row, bench), partial(_bare, torch.zeros(row.count))]
        ratios = found[str(size)] = []
        for number in range(rounds * PAIRS):
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {which: both[which]() for which in order}
            ratios.append(seconds[0] / seconds[1])
    return found


def _ours(row: Case, bench: Bench) -> float:
    """What comm.py tells of a row, from one repeat."""
    _, (seconds,) = timed(row, place(None), bench)
    return slowest(seconds)


def _bare(x: torch.Tensor) -> float:
    """What a loop of calls takes, with warm-up."""
    calls = min(max(4 * MB // x.nbytes, 3), 100)
    for _ in range(3):
        dist.all_reduce(x)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x)
    return slowest((time.perf_counter() - start) / calls)


def measured(args: argparse.Namespace) -> dict[str, list[float]]:
    """All ratios, by what is compared."""
    size, small = (64 * 2**10, [2**10]) if args.quick else (16 * MB, [2**10, 2**16, MB, 16 * MB])
    found = {
        f"{name}, {processes} processes": ratios
        for processes in (2, 3)
        for name, ratios in in_ranks(processes, rings, size, args.rounds, args.calls).items()
    }
    for bytes_, ratios in in_ranks(2, figures, small, args.rounds).items():
        found[f"comm.py at {int(bytes_):,} bytes"] = ratios
    return found


# By the beginning of what is compared: between which bounds the median is to be.
TARGETS = {f"{ring.NAME},": (0.0, 2.0), "comm.py": (0.9, 1.1)}


def target(name: str) -> tuple[float, float] | None:
    """The bounds of a ratio; None where there are none."""
    return next((bounds for begins, bounds in TARGETS.items() if name.startswith(begins)), None)


def reached(name: str, ratio: float) -> bool:
    """Whether it is within them."""
    low, high = target(name) or (0.0, float("inf"))
    return low <= ratio <= high


def line(name: str, ratios: Sequence[float]) -> str:
    """A line of the table."""
    middle, bounds = median(ratios), target(name)
    wanted = "" if bounds is None else f"at most {bounds[1]}" if not bounds[0] else f"{bounds[0]} to {bounds[1]}"
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"{name:32}{middle:8.3f}   {spread:16}{wanted}{'' if reached(name, middle) else '   MISSED'}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="in which rivals take turns")
    parser.add_argument("--calls", type=int, default=5, help="of an all-reduce in a round of a ring")
    parser.add_argument("--quick", action="store_true", help="a small size and one round, to see that it runs")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.calls = 1, 2
    environment.keep_memory()
    torch.set_num_threads(1)
    header = {"rounds": args.rounds, **environment.setting()}
    found = measured(args)
    print(*(f"{key}: {value}" for key, value in header.items()), sep="\n")
    print(f"{'seconds over its rival':32}{'ratio':>8}   {'of all rounds':16}target")
    print(*(line(name, ratios) for name, ratios in found.items()), sep="\n")
    if args.out:
        ratios = {name: median(each) for name, each in found.items()}
        told = {"benchmark": "comm_speed", **header, "ratios": ratios, "rounds_ratios": found}
        args.out.write_text(json.dumps(told, indent=2) + "\n")
    if not args.quick and not all(reached(name, median(ratios)) for name, ratios in found.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
