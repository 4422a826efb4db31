"""How far rounding alone moves what training ends with, beside how far seeds do.

    python benchmarks/rounding_spread.py                         # the default run: minutes
    python benchmarks/rounding_spread.py --flags --data Chat     # of texts; any flags of kd.py, as the last option
    python benchmarks/rounding_spread.py --quick

Threads and processes add the same numbers in other orders. Each run of `kd.py --exact null` has the same seeds and
another number of threads or processes; whatever differs between them is rounding, as training amplifies it. Its spread
is the standard deviation over runs, the one between seeds that over seeds, both pooled.
"""

import argparse
import json
import math
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

from benchmarks import common
from benchmarks.common import Measurement, Target
from harness.reports.results import Results

QUICK = (
    "--data", "Digits", "--trainer.max_epochs", "1", "--data.train_size", "80", "--data.test_size", "50",
    "--teacher", "LightNN", "--only", "ce", "kd",
)  # fmt: skip
ROUNDING, LARGEST, SEEDS = "by rounding", "by rounding, most", "between seeds"
TARGETS = {"rounding / seeds": Target("the spread by rounding over that between seeds, of each net", high=0.5)}


class Place(NamedTuple):
    """Where a run computes."""

    processes: int
    threads: int  # of each process

    def __str__(self) -> str:
        return f"{self.processes} x {self.threads}"


def measure_scores(place: Place, seeds: int, flags: Sequence[str]) -> dict[str, list[float]]:
    """Run kd.py; return the score of each net with each seed, in its unit."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--exact", "null", "--seeds", str(seeds), "--trainer.logger", "false", "--out", folder]
        command = common.command_line("kd", *flags, *fixed, "--trainer.devices", str(place.processes))
        environment = {**os.environ, "OMP_NUM_THREADS": str(place.threads)}
        common.run_program(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        results = Results.read(json.loads(Path(folder, "results.json").read_text()))
    metric = results.metric
    scores = {name: net.scores[metric.name] for name, net in results.nets.items()}
    return {name: [metric.scale * x for x in of_seeds if x is not None] for name, of_seeds in scores.items()}


def pooled(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation within groups."""
    return math.sqrt(fmean(map(variance, groups)))


def spreads(by_place: Mapping[Place, Sequence[float]]) -> dict[str, float]:
    """Return the deviation by rounding, the largest difference of a seed by it, and the deviation between seeds."""
    by_seed = list(zip(*by_place.values(), strict=True))
    largest = max(max(values) - min(values) for values in by_seed)
    return {ROUNDING: pooled(by_seed), LARGEST: largest, SEEDS: pooled([*by_place.values()])}


def measure(args: argparse.Namespace) -> Measurement:
    flags = [*QUICK, *args.flags] if args.quick else args.flags
    places = (
        [Place(1, 1), Place(2, 1)] if args.quick else [Place(1, 1), Place(1, 2), Place(1, 4), Place(2, 1), Place(3, 1)]
    )
    found = {}
    for place in places:
        found[place] = measure_scores(place, args.rounds, flags)
        lines = (f"{name} {' '.join(f'{x:.2f}' for x in values)}" for name, values in found[place].items())
        print(f"{place}:", *lines, sep="  ", flush=True)
    nets = {name: spreads({place: scores[name] for place, scores in found.items()}) for name in found[places[0]]}
    figures = {figure: {name: [of[figure]] for name, of in nets.items()} for figure in (ROUNDING, LARGEST, SEEDS)}
    ratios = common.over(*([of[figure] for of in nets.values() if of[SEEDS]] for figure in (ROUNDING, SEEDS)))
    scores = {str(place): values for place, values in found.items()}
    return Measurement(figures, {"rounding / seeds": ratios}, {"processes x threads": scores})


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, ("--seeds", 3), "how many, from 0 on")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="of kd.py; the last option")
    common.run(parser.parse_args(argv), measure, TARGETS)


if __name__ == "__main__":
    main()
