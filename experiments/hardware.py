"""One model through every strategy that fits the machine, to choose one.

    python experiments/hardware.py --trainer.devices 2                   # DeepNN on Digits: a minute on 2 cores
    python experiments/hardware.py --only ddp fsdp --data ImageFolder --data.root photographs --net ResNet

Each row is a short fit of its own, measured from inside its ranks: images/s, state and peak memory a rank, bytes sent a
step, the share of communication that is hidden, and how far the weights end from those of one process. OUT/ holds
report.html, results.json, .md and .png.
"""

from harness import start

if __name__ == "__main__":
    start.script(OMP_WAIT_POLICY="PASSIVE")  # threads that spin while they wait slow small nets down

from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from lightning.pytorch import LightningDataModule
from torch import nn

import datamodules
from harness import cli
from harness.runs.options import EXACT, OneSeedOptions
from harness.runs.session import load_data, session
from harness.runs.training_options import add_optimizer, add_trainer
from harness.studies.choices import learner_options, make_net
from lab.studies.hardware import Bench, Cases, Study
from lab.studies.isolation import IDLE, default_devices, one_thread, usual_threads
from lit_modules import nets
from lit_modules.classifier import LitClassifier


@dataclass
class Options(OneSeedOptions):
    """Options of the comparison."""

    only: list[str] | None = cli.option(None, on_resume=cli.GROWS)
    """measure just these, as in --only ddp fsdp; one process is measured in any case."""
    steps: int = cli.option(24, cli.at_least(1, "steps"))
    """optimizer steps that are timed, at least."""
    exact: int | None = cli.option(None, EXACT)
    """number of shards of the rows called NAME-exact; when not given, 8 or the number of devices."""
    idle: ClassVar[Collection[str]] = ("checkpoint_every",)


def parser() -> cli.Parser:
    """Make the command line: data, net, optimizer, trainer; a strategy's options are those of its row."""
    parser = cli.Parser("hardware.py", (__doc__ or "").split("\n", 1)[0], Options)
    parser.add_choice("data", cli.Classes((datamodules.ImageData, LightningDataModule), datamodules), "Digits")
    net = cli.Classes((nets.Net, nn.Module), nets, frozenset({"input_shape", "num_classes"}))
    parser.add_choice("net", net, "DeepNN")
    add_optimizer(parser)
    add_trainer(parser, loggers=False, idle=IDLE, devices=default_devices())
    return parser


def classifier(config: Namespace, data: datamodules.InMemoryData) -> LitClassifier:
    """Build the module, with the same first weights in every row."""
    net = make_net(config, "net", config.seeds[0], data.net_arguments)
    return LitClassifier(net, data.num_classes, **learner_options(config, data), seed=config.seeds[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line describes."""
    with one_thread() as threads, session("hardware", parser(), argv) as run:
        run.announce()
        config = run.config
        cases = Cases(config.trainer, config.exact)
        picked, skipped = cases.pick(config.only)
        data = load_data(config)
        data.order_seed = config.seeds[0]
        for devices in (1, cases.devices):
            data.check_replicas(devices)
        net = make_net(config, "net", config.seeds[0], data.net_arguments)
        with nets.any_kernel(net):
            nets.check_fits(net, data.example, (data.num_classes,))
        nets.check_same_start(classifier(config, data).net, classifier(config, data).net)
        picked, unsuited = cases.pick_for_module(picked, classifier(config, data), config.only)
        accumulate = config.trainer.init_args["accumulate_grad_batches"]
        make = partial(classifier, config, data)
        bench = Bench(make, data, config.steps, accumulate, usual_threads(data.input_shape, threads))
        with run.folder():
            Study(run, threads=bench.threads).run(bench, picked, skipped | unsuited)


if __name__ == "__main__":
    start.run(main)
