"""How fast the pipeline strategy is on two CPU cores, as ratios in one run.

    python benchmarks/pipeline_speed.py                            # half an hour on 2 cores
    python benchmarks/pipeline_speed.py --parts cost --pairs 20
    python benchmarks/pipeline_speed.py --quick                    # seconds: tiny sizes, whose figures say nothing

fits: seconds a step of ResNet-50, batches of 120 images of 3 x 128 x 128, two stages, one thread a process: one process
    on whole batches and on 8 micro-batches, the split, pipelines, and two processes that train on half a batch each and
    don't talk, which is the machine's limit. "plain" is one process on whole batches with glibc's memory as it comes,
    as a script has it that doesn't ask for more; all others keep what they free, as the experiments do. Rivals take
    turns: a ratio is of one round, and told is the median.
cost: the same pipeline under 1F1B with 8 micro-batches, by the strategy and by a bare loop over
    torch.distributed.pipelining with copies of the same stages and an optimizer, in turns of a step in the same ranks.

The layers are cut once, by time, for all rounds. It ends with exit code 1 where a target is missed.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.optim import SGD

import strategies
from apprentice.keyed import with_seed
from harness.runs import environment
from harness.runs.files import write_json
from harness.runs.progress import quiet
from harness.studies.isolation import fit_isolated
from harness.studies.pipeline import Bench, Case, Cases, Cut, Noise
from harness.studies.pipeline.cases import BY_TIME, bubble_bound
from harness.studies.pipeline.measure import timed_only
from harness.studies.pipeline.task import LEARNING_RATE
from harness.studies.trainers import QUIET
from lit_modules import nets

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
MICROBATCHES = 8  # in which schedules are compared
WARMUP = 2  # pairs of steps that are not timed
FULL = {"batch_size": 120, "image_size": 128, "num_classes": 1000}
QUICK = {"batch_size": 8, "image_size": 32, "num_classes": 10}


class Setting:
    """What all parts compute.

    Args:
        args: the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        from experiments import pipeline

        sizes = QUICK if args.quick else FULL
        self.batch, self.classes = sizes["batch_size"], sizes["num_classes"]
        self.shape = (3, sizes["image_size"], sizes["image_size"])
        make = partial(nets.ResNet, 8) if args.quick else partial(nets.Torchvision, "resnet50")
        net = with_seed(0, lambda: make(input_shape=self.shape, num_classes=self.classes))
        self.make = partial(pipeline.module, nets.pipeline_stages(net))
        trainer = pipeline.parser().parse(["--trainer.accelerator", "cpu", "--trainer.devices", "2"]).trainer
        self.rows = Cases(trainer, args.schedules, self.batch, [self.size(MICROBATCHES)], None)
        self.whole, self.half = (self.bench(rows, args.steps) for rows in (self.batch, self.batch // 2))
        self.cut = self._cut(args.balance)

    def size(self, num_microbatches: int) -> int:
        """Images of one of so many micro-batches."""
        return -(-self.batch // num_microbatches)

    def loader(self, rows: int, steps: int) -> Noise:
        """So many steps of so many images."""
        return Noise(rows, self.shape, self.classes, steps, seed=0)

    def bench(self, rows: int, steps: int) -> Bench:
        """Measures so many steps of so many images."""
        return Bench(self.make, partial(self.loader, rows), batches=1, repeats=steps)

    def pipelined(self, schedule: str, num_microbatches: int, split: bool = False) -> Case:
        """A pipeline; under a schedule of several stages a rank, cut by time in each fit."""
        row = self.rows.pipelined(schedule, self.cut, self.size(num_microbatches), split)
        if row is None:
            raise SystemExit(f"error: {schedule} can't be run with {num_microbatches} micro-batches")
        return row

    def _cut(self, sizes: list[int] | None) -> Cut:
        if sizes is None:
            row = self.rows.pipelined("1F1B", BY_TIME, self.size(MICROBATCHES))
            assert row is not None
            sizes = self.bench(self.batch, 1).measure(row)[1]["sizes"]
            print(f"layers of the stages: {sizes}", flush=True)
        return Cut.of(sizes)


# Fits of rivals in turns


def fits(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of each rival, and their ratios."""
    whole, size = setting.whole, setting.size(MICROBATCHES)
    same = {f"{name} {MICROBATCHES}": setting.pipelined(name, MICROBATCHES) for name in args.schedules}
    more = args.schedules[-1]
    pipelines = same | {f"{more} {count}": setting.pipelined(more, count) for count in args.num_microbatches}
    rows = {"one": setting.rows.alone(setting.batch), f"one {MICROBATCHES}": setting.rows.alone(size)}
    rows |= {"split": setting.pipelined("GPipe", 1, split=True), **pipelines}
    rivals: dict[str, Callable[[], float]] = {name: partial(_seconds, whole, row) for name, row in rows.items()}
    rivals["halves"] = partial(_together, partial(_seconds, setting.half, rows["one"]))
    rivals["plain"] = partial(_plain, args, setting.cut)
    runs: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(args.rounds):
        for name, measure in rivals.items():
            runs[name].append(measure())
            print(f"round {number + 1}: {name:24} {runs[name][-1]:8.3f} s a step", flush=True)
    best, best_same = (min(chosen, key=lambda name: median(runs[name])) for chosen in (pipelines, same))
    bound = bubble_bound(2, MICROBATCHES)
    ratios = {
        "split": _ratio(runs["one"], runs["split"]),
        "bound": _ratio(runs[f"one {MICROBATCHES}"], runs[best_same]) / bound,
        "whole": _ratio(runs["one"], runs[best]),
        "plain": _ratio(runs["plain"], runs[best]),
        "halves": _ratio(runs[best], runs["halves"]),
    }
    found = {name: median(seconds) for name, seconds in runs.items()}
    return {"seconds": found, "best": best, f"best of {MICROBATCHES}": best_same, "ratios": ratios, "runs": runs}


def _seconds(bench: Bench, row: Case) -> float:
    facts, _ = bench.measure(row)
    return mean(facts["seconds_per_step"])


def _ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """The median over rounds: what slows a whole round down is in both."""
    return median(a / b for a, b in zip(above, below, strict=True))


def _together(measure: Callable[[], float]) -> float:
    """The longest of what two processes find at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_one_of_them, args=(measure, folder), nprocs=2, start_method="fork")
        return max(float(file.read_text()) for file in Path(folder).iterdir())


def _plain(args: argparse.Namespace, cut: Cut) -> float:
    """What a fresh process finds, that has not asked to keep its memory."""
    args = argparse.Namespace(**{**vars(args), "balance": cut.balance})
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_one_by_itself, args=(args, folder), nprocs=1, start_method="spawn")
        return float((Path(folder) / "0").read_text())


def _one_by_itself(number: int, args: argparse.Namespace, folder: str) -> None:
    strategies.register()
    torch.set_num_threads(1)
    with quiet():
        setting = Setting(args)
        _one_of_them(number, partial(_seconds, setting.whole, setting.rows.alone(setting.batch)), folder)


def _one_of_them(number: int, measure: Callable[[], float], folder: str) -> None:
    (Path(folder) / str(number)).write_text(str(measure()))


# The strategy's own cost


class InTurns(Callback):
    """Before each step of the strategy takes one of a bare loop, and times both; a rank writes them to `rank<r>.json`.

    Args:
        folder: where.
        sizes: layers of each rank's stage.
    """

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self.folder, self.sizes = folder, sizes
        self.seconds: dict[str, list[float]] = {"bare": [], "strategy": []}
        self._start: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy this rank's stage, and put torch's own schedule over it."""
        rank, all_layers = trainer.global_rank, pl_module.pipeline_stages()  # type: ignore[operator]
        start = sum(self.sizes[:rank])
        layers = nn.Sequential(*copy.deepcopy(all_layers[start : start + self.sizes[rank]]))
        self.optimizer = SGD(layers.parameters(), LEARNING_RATE)
        self.stage = PipelineStage(layers, rank, len(self.sizes), trainer.strategy.root_device)
        self.schedule = Schedule1F1B(self.stage, MICROBATCHES, loss_fn=F.mse_loss)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End the strategy's step, and take a bare one."""
        self._end_step()
        start = _now()
        self.optimizer.zero_grad()
        if self.stage.is_first:
            self.schedule.step(batch.images)
        else:
            self.schedule.step(target=batch.targets, losses=[])
        self.optimizer.step()
        self._start = _now()
        self.seconds["bare"].append(self._start - start)

    def _end_step(self) -> None:
        if self._start is not None:
            self.seconds["strategy"].append(_now() - self._start)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write them down; the last step's end is here."""
        self._end_step()
        write_json(self.folder / f"rank{trainer.global_rank}.json", self.seconds)


def _now() -> float:
    """The time at which both ranks are here."""
    dist.barrier()
    return time.perf_counter()


def cost(setting: Setting, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of the strategy and of the bare loop."""
    row = setting.pipelined("1F1B", MICROBATCHES)
    steps = WARMUP + args.pairs
    with tempfile.TemporaryDirectory() as folder:
        turns = InTurns(Path(folder), setting.cut.balance)
        trainer = row.trainer(callbacks=[turns], **QUIET | {"max_steps": steps})
        module, loader = setting.make(row), setting.loader(setting.batch, steps)
        with timed_only():
            fit_isolated(trainer, partial(trainer.fit, module, loader), threads=1)
        ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    runs = {
        name: [max(pair) for pair in zip(*(rank[name][WARMUP:] for rank in ranks), strict=True)]
        for name in ("bare", "strategy")
    }
    found = {name: median(seconds) for name, seconds in runs.items()}
    return {"seconds": found, "ratios": {"cost": _ratio(runs["strategy"], runs["bare"])}, "runs": runs}


PARTS: dict[str, Callable[[Setting, argparse.Namespace], dict[str, Any]]] = {"fits": fits, "cost": cost}


class Target(NamedTuple):
    """What a ratio is to reach.

    Attributes:
        text: what is compared.
        low: at least.
        high: at most.
        aim: what would be better still.
    """

    text: str
    low: float = 0.0
    high: float = float("inf")
    aim: str = ""

    def words(self, ratio: float) -> str:
        """The target, and whether it is missed."""
        wanted = [f"at least {self.low}"] * (self.low > 0) + [f"at most {self.high}"] * (self.high < float("inf"))
        return f"{''.join(wanted)}{self.aim}{'' if self.reached(ratio) else '   MISSED'}"

    def reached(self, ratio: float) -> bool:
        """Whether the ratio is within the bounds."""
        return self.low <= ratio <= self.high


TARGETS = {
    "split": Target("speed of the split over one process", low=0.93),
    "bound": Target(
        f"speed-up at {MICROBATCHES} micro-batches over one process on them / bound", 0.92, aim=", aim 0.95"
    ),
    "whole": Target("speed of the best pipeline over one process on whole batches"),
    "plain": Target("the same over such a process with glibc's memory as it comes", low=2.0),
    "halves": Target("seconds of the best pipeline over two independent halves", high=1.08),
    "cost": Target("seconds of the strategy over a bare loop", high=1.05),
}


def table(ratios: dict[str, float]) -> str:
    """A line a ratio, with its target."""
    lines = [f"{TARGETS[name].text:66}{ratio:7.3f}   {TARGETS[name].words(ratio)}" for name, ratio in ratios.items()]
    return "\n".join([f"{'':66}{'ratio':>7}   target", *lines])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="in which rivals take turns")
    parser.add_argument("--steps", type=int, default=3, help="that are timed in each round")
    parser.add_argument("--pairs", type=int, default=8, help="for cost: steps of each of the two")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, help="for fits")
    parser.add_argument("--num_microbatches", nargs="+", type=int, default=[12], help="more, of the last schedule")
    parser.add_argument("--balance", nargs=2, type=int, help="layers of the two stages; by time if not given")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path, help="write all figures to this file, as JSON")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.steps, args.pairs = 1, 1, 1
    strategies.register()
    environment.keep_memory()
    torch.set_num_threads(1)
    header = {"rounds": args.rounds, **environment.setting()}
    with quiet():
        setting = Setting(args)
        parts = {name: PARTS[name](setting, args) for name in args.parts}
    ratios = {name: ratio for part in parts.values() for name, ratio in part["ratios"].items()}
    for name, part in parts.items():
        print(f"{name}: {json.dumps({key: value for key, value in part.items() if key != 'runs'})}")
    print(*(f"{key}: {value}" for key, value in header.items()), table(ratios), sep="\n")
    if args.quick:
        print("sizes are tiny: what is missed says nothing")
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "pipeline_speed", **header, "parts": parts}, indent=2) + "\n")
    if not args.quick and not all(TARGETS[name].reached(ratio) for name, ratio in ratios.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
