"""How fast the pipeline strategy is on two CPU cores, as ratios in one run.

    python benchmarks/pipeline_speed.py                            # half an hour on 2 cores
    python benchmarks/pipeline_speed.py --parts cost --pairs 20
    python benchmarks/pipeline_speed.py --quick                    # seconds: tiny sizes, whose figures say nothing

fits: seconds a step of ResNet-50, batches of 120 images of 3 x 128 x 128, two stages, one thread a process: one process
    on whole batches and on 8 micro-batches, the split, pipelines, and two processes that train on half a batch each and
    don't communicate, which is the machine's limit. "plain" is one process on whole batches with glibc's defaults; all
    others keep the memory that they free, as the experiments do.
cost: the same pipeline under 1F1B with 8 micro-batches, by the strategy and by a bare loop over
    torch.distributed.pipelining.

The layers are cut once, by time, for all schedules of one stage a rank. Each fit has processes of its own. Ends with
exit code 1 where a target is missed.
"""

import argparse
import copy
from collections.abc import Sequence
from functools import partial
from statistics import mean, median
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F
from torch.optim import SGD

from apprentice.keyed import with_seed
from benchmarks import common
from benchmarks.common import Measurement, Rivals, Target
from harness.runs import environment
from lab.studies.isolation import run_forked
from lab.studies.meters import Stamps
from lab.studies.pipeline import Noise, Task
from lab.studies.pipeline.cases import ONE_STAGE
from lit_modules import nets
from strategies import PipelineStrategy
from strategies.base.stages import group_modules, sizes_by_cost
from strategies.pipeline.cutting import seconds as layer_seconds

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"]
MICROBATCHES = 8  # in which schedules are compared
BOUND = 2 * MICROBATCHES / (MICROBATCHES + 1)  # on the speed-up, by the bubble
WARMUP = 2  # steps
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


class Setting:
    """The net, its batches and its cut."""

    def __init__(self, args: argparse.Namespace) -> None:
        size, classes, self.batch = (32, 10, 8) if args.quick else (128, 1000, 120)
        self.shape, self.classes = (3, size, size), classes
        make = partial(nets.ResNet, 8) if args.quick else partial(nets.Torchvision, "resnet50")
        net = with_seed(0, lambda: make(input_shape=self.shape, num_classes=classes))
        self.layers, self.steps = nets.pipeline_stages(net), args.steps
        piece = self.loader(-(-self.batch // MICROBATCHES), 1).batch.images
        self.sizes = args.balance
        if not self.sizes:
            self.sizes = run_forked(lambda _: sizes_by_cost(layer_seconds(self.layers, (piece,)), range(2)))[0]
        print(f"layers of the stages: {self.sizes}", flush=True)

    def loader(self, rows: int, steps: int) -> Noise:
        return Noise(rows, self.shape, self.classes, steps, seed=0)

    def step_seconds(self, num_microbatches: int = 1, copies: int = 1, **settings: Any) -> float:
        """Return the mean seconds of a step, with settings of the Trainer; `copies` fits share the batch."""
        loader = self.loader(self.batch // copies, WARMUP + self.steps)
        module = Task(copy.deepcopy(self.layers), num_microbatches)
        return mean(common.step_seconds(module, loader, self.steps, WARMUP, **settings))

    def alone(self, num_microbatches: int = 1, copies: int = 1, keep: bool = True) -> float:
        """Time a step on one process, or of the slower of two that share the batch; `keep` is `Clock`'s."""
        settings: dict[str, Any] = {"devices": 1, "keep": keep}
        return max(run_forked(lambda _: self.step_seconds(num_microbatches, copies, **settings), copies))

    def pipelined(self, schedule: str, num_microbatches: int) -> float:
        """Time a step on two ranks; each fit cuts by time under a schedule with several stages a rank."""
        balance: Any = self.sizes if schedule in ONE_STAGE else "time"
        strategy = PipelineStrategy(schedule, num_microbatches, balance=balance)  # type: ignore[arg-type]
        return self.step_seconds(devices=2, strategy=strategy)

    def bare(self) -> float:
        """Time a step of torch's own 1F1B schedule and an optimizer, without Lightning."""

        def seconds() -> float:
            environment.keep_memory()
            rank, batch = dist.get_rank(), self.loader(self.batch, 1).batch
            layers = nn.Sequential(*group_modules(self.layers, self.sizes)[rank])
            optimizer = SGD(layers.parameters(), lr=0.001)
            stage = PipelineStage(layers, rank, 2, common.CPU)
            schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
            stamps = Stamps(common.CPU)
            for _ in range(WARMUP + self.steps + 1):
                dist.barrier()
                stamps.mark()
                optimizer.zero_grad()
                if rank == 0:
                    schedule.step(batch.images)
                else:
                    schedule.step(target=batch.targets, losses=[])
                optimizer.step()
            return mean(stamps.seconds()[WARMUP:])

        return max(common.run_in_ranks(2, seconds))


def fits(setting: Setting, args: argparse.Namespace) -> Measurement:
    compared = {f"{name} {MICROBATCHES}": (name, MICROBATCHES) for name in args.schedules}
    last = args.schedules[-1]
    pipelines = compared | {f"{last} {count}": (last, count) for count in args.num_microbatches}
    rivals: Rivals = {
        "one": setting.alone,
        f"one {MICROBATCHES}": partial(setting.alone, MICROBATCHES),
        "split": partial(setting.pipelined, "GPipe", 1),
        **{name: partial(setting.pipelined, *options) for name, options in pipelines.items()},
        "halves": partial(setting.alone, copies=2),
        "plain": partial(setting.alone, keep=False),
    }
    runs = common.take_turns(rivals, args.rounds, "s a step")
    best, best_compared = (min(names, key=lambda name: median(runs[name])) for names in (pipelines, compared))
    ratios = {
        "split": common.over(runs["one"], runs["split"]),
        "bound": [ratio / BOUND for ratio in common.over(runs[f"one {MICROBATCHES}"], runs[best_compared])],
        "whole": common.over(runs["one"], runs[best]),
        "plain": common.over(runs["plain"], runs[best]),
        "halves": common.over(runs[best], runs["halves"]),
    }
    return Measurement({"s a step (fits)": runs}, ratios, {"best": best, f"best of {MICROBATCHES}": best_compared})


def cost(setting: Setting, args: argparse.Namespace) -> Measurement:
    setting.steps = args.pairs
    rivals: Rivals = {"strategy": partial(setting.pipelined, "1F1B", MICROBATCHES), "bare": setting.bare}
    runs = common.take_turns(rivals, args.rounds, "s a step")
    return Measurement({"s a step (cost)": runs}, {"cost": common.over(runs["strategy"], runs["bare"])})


PARTS = {"fits": fits, "cost": cost}


def measure(args: argparse.Namespace) -> Measurement:
    common.one_thread()
    setting = Setting(args)
    return common.merge([PARTS[name](setting, args) for name in args.parts])


def main(argv: Sequence[str] | None = None) -> None:
    command = common.parser(__doc__, ("--rounds", 3), "in which rivals take turns")
    command.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    command.add_argument("--steps", type=int, default=3, help="that are timed in each round")
    command.add_argument("--pairs", type=int, default=3, help="for cost: steps of each of the two in a round")
    command.add_argument("--schedules", nargs="+", default=SCHEDULES, help="for fits")
    command.add_argument("--num_microbatches", nargs="+", type=int, default=[6], help="more, of the last schedule")
    command.add_argument("--balance", nargs=2, type=int, help="layers of the two stages; by time if not given")
    command.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    args = command.parse_args(argv)
    if args.quick:
        args.rounds, args.steps, args.pairs = 1, 1, 1
    common.run(args, measure, TARGETS, strict=not args.quick)


if __name__ == "__main__":
    main()
