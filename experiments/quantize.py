"""A trained student in int8: quantised, exported, checked and measured.

    python experiments/quantize.py --run RUN/seed0/kd          # any student of kd.py's, on its run's data
    python experiments/quantize.py --run RUN/seed0/kd --objective Hinton     # distilled from its teacher again
    python experiments/quantize.py                             # a student trained for it, on the embedded digits

The student in float32, in bfloat16, in int8 after training and in int8 by quantisation-aware training. Each is
written as safetensors, torch.export's format and ONNX, as far as these can hold it, and each file is read again in a
fresh process and compared on the whole test set. OUT/ holds the files, the table (report.html, results.json, .md,
.png), and a TensorBoard run. Needs the extras: pip install --no-build-isolation -e '.[quant,export]'
"""

from harness import start

if __name__ == "__main__":
    start.script(OMP_WAIT_POLICY="PASSIVE")  # threads that spin while they wait slow small nets down

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import datamodules
import strategies
from apprentice import extras
from apprentice.errors import BadInput
from deploy import writers
from deploy.int8 import EXTRA
from deploy.int8.builder import Builder, images_of
from deploy.int8.options import Options, data_of_run
from deploy.int8.study import Study
from deploy.latency import Latency, need_compiler
from harness import cli
from harness.runs.launch import is_main_process
from harness.runs.nets import nets_in
from harness.runs.session import session
from harness.runs.training_options import add_optimizer, add_trainer
from lit_modules import nets, objectives

DATA = "Digits"


def parser(data: Any = DATA) -> cli.Parser:
    """The command line: data, a fresh student, the objective of quantisation-aware training, optimizer, trainer."""
    parser = cli.Parser("quantize.py", (__doc__ or "").split("\n", 1)[0], Options)
    net = cli.Classes((nets.Net, nn.Module), nets, frozenset({"input_shape", "num_classes"}))
    method = cli.Classes((objectives.Objective, objectives.FeatureObjective), objectives)
    parser.add_choice("data", cli.Classes((datamodules.ImageData,), datamodules), data)
    parser.add_choice("student", net, "LightNN")
    parser.add_choice("objective", method, "CrossEntropy")
    parser.add_class("latency", cli.options_of(Latency))
    add_optimizer(parser, {"class_path": "Adam", "init_args": {"lr": 1e-4}})
    add_trainer(parser, max_epochs=5, log_every_n_steps=10)
    return parser


def check_options(config: Namespace, trainer: Trainer) -> None:
    """Raise BadInput for options that contradict each other."""
    chosen = config.trainer.init_args
    if config.run is not None and config.student != parser().parse([]).student:
        raise BadInput("student", config.student.name, "not allowed with --run, which has the student")
    if (every := chosen["check_val_every_n_epoch"]) != 1:
        raise BadInput("trainer.check_val_every_n_epoch", every, "not allowed, as --evaluate_every says it")
    if (limit := chosen["limit_test_batches"]) is not None:
        expected = "not allowed, as all formats are tested alike; --data.test_size limits them"
        raise BadInput("trainer.limit_test_batches", limit, expected)
    epochs = chosen["max_epochs"]
    if epochs is not None and 0 <= epochs < config.evaluate_every:
        raise BadInput("evaluate_every", config.evaluate_every, f"at most --trainer.max_epochs, {epochs}")
    strategy = trainer.strategy
    forked = type(strategy) is strategies.DDP and strategy.start_method != "spawn"
    if not (forked or isinstance(strategy, SingleDeviceStrategy)):
        raise BadInput("trainer.strategy", type(strategy).__name__, "ddp, or a single device")


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line describes."""
    argv = sys.argv[1:] if argv is None else argv
    with cli.one_line_errors():
        command = parser(data_of_run(argv, DATA, datamodules.ImageData))
    with session("quantize", command, argv) as run:
        config = run.config
        announced = run if config.run is None else run.with_settings(student=config.run)
        announced.announce()
        if config.data is None:
            expected = "a net's folder in its run's, with config.yaml; or --data, what it learnt from"
            raise BadInput("run", config.run, f"{expected}{nets_in(config.run)}")
        extras.need(*EXTRA)
        extras.need(*writers.EXTRA)
        need_compiler()
        check_options(config, run.trainer())
        latency, builder = cli.build(config.latency, "latency"), Builder(run)
        builder.check()
        with run.folder():
            study = Study(run, latency) if is_main_process() else None
            net, saved = builder.student()
            int8 = builder.int8(net)
            if study is not None:
                study.run(saved, *images_of(run.data, "test"), partial(builder.formats, net, int8))


if __name__ == "__main__":
    start.run(main)
