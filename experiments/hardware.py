"""One model through every strategy that fits the machine: how a user chooses one.

    python experiments/hardware.py --trainer.devices 2                   # DeepNN on Digits: a minute on 2 cores
    python experiments/hardware.py --only ddp fsdp --data ImageFolder --data.root photographs --net ResNet
    python experiments/hardware.py --help

Each row is a short fit of its own, measured from inside its ranks: images/s, state and peak memory a rank, bytes sent a
step, the share of communication that is hidden, and how far the weights end from those of one process. OUT/ holds
results.json, .md and .png.
"""

import os

# Before torch is loaded: threads that spin while they wait cost small nets most of their time; a profiler that chats.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import datamodules
import strategies
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness import config as cli
from harness.runs import environment, session, signals
from harness.runs.progress import quiet
from harness.studies.hardware import Bench, Cases, Study
from harness.studies.isolation import one_thread, usual_threads
from harness.studies.study import ResumableResults
from harness.studies.trainers import default_devices
from lit_modules import nets
from lit_modules.classifier import LitClassifier


@dataclass
class Options(cli.OneSeedOptions):
    """Options of the comparison.

    Args:
        exact: number of shards of the rows called NAME-exact; when not given, 8 or the number of devices.
        only: measure just these, as in --only ddp fsdp; one process is measured in any case.
        steps: optimizer steps that are timed, at least.
    """

    only: list[str] | None = None
    steps: int = 24

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps < 1:
            raise BadInput("steps", self.steps, "a number of steps, at least 1")


def parser() -> cli.Parser:
    """What can be chosen: data, net, optimizer, trainer; a strategy that is chosen has its options in its row."""
    parser = cli.Parser("hardware.py", (__doc__ or "").split("\n", 1)[0], Options)
    parser.add_choice("data", datamodules.ImageData, datamodules, "Digits")
    parser.add_choice("net", (nets.Net, nn.Module), nets, "DeepNN", skip={"input_shape", "num_classes"})
    parser.add_optimizer()
    parser.add_trainer(strategies.NAMES, devices=default_devices())
    return parser


def classifier(config: Namespace, data: Any, split: bool = False) -> LitClassifier:
    """What is trained, the same from the first weights on in every row."""
    shape = {"input_shape": data.input_shape, "num_classes": data.num_classes}
    net = with_seed(config.seeds[0], lambda: cli.build(config.net, "net", **shape))
    if split:
        net = nn.DataParallel(net)
    optimizer = cli.factory(config.optimizer, "optimizer")
    scheduler = None if config.scheduler is None else cli.factory(config.scheduler, "scheduler")
    return LitClassifier(net, data.num_classes, optimizer, scheduler, seed=config.seeds[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line describes."""
    command = parser()
    with cli.one_line_errors(command), signals.handled(), quiet(), one_thread() as threads:
        config = command.parse(argv)
        strategies.register()
        cases = Cases(config.trainer, config.exact)
        picked, skipped = cases.picked(config.only)
        data = cli.build(config.data, "data")
        data.prepare_data()
        data.setup()
        data.order_seed = config.seeds[0]
        for devices in (1, cases.devices):
            data.check_replicas(devices)
        environment.keep_memory()
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        nets.check_same_start(classifier(config, data).net, classifier(config, data).net)
        accumulate = config.trainer.init_args["accumulate_grad_batches"]
        make = partial(classifier, config, data)
        bench = Bench(make, data, config.steps, accumulate, usual_threads(data.input_shape, threads))
        with session.opened("hardware", command, config) as out:
            results = ResumableResults("hardware", "strategy", out, command, config, threads=bench.threads)
            Study(results).run(bench, picked, skipped)


if __name__ == "__main__":
    main()
