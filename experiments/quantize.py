"""A trained student to int8, exported, checked and measured: from a run's folder to a file that answers elsewhere.

    python experiments/quantize.py --run RUN/seed0/kd          # any student of kd.py's, on its run's data
    python experiments/quantize.py --run RUN/seed0/kd --objective Hinton     # its teacher goes on teaching it
    python experiments/quantize.py                             # a student trained for it, on the embedded digits
    python experiments/quantize.py --help

The student in float32 and bfloat16, in int8 after training, and in int8 after quantisation-aware training. Each is
written as safetensors, torch.export's format and ONNX, as far as these can hold it, and each file is read again in a
fresh process and compared on the whole test set. OUT/ holds the files, the table (results.json, .md, .png), and a
TensorBoard run. Needs the extras: pip install --no-build-isolation -e '.[quant,export]'
"""

import os

# Before torch is loaded: threads that spin while they wait cost small nets most of their time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import copy
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import datamodules
import strategies
from apprentice import extras
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness import config as cli
from harness.runs import environment, job, launch, session, signals
from harness.runs.files import atomic
from harness.runs.fit import MakeTrainer, fit_and_test
from harness.runs.nets import Spec, spec
from harness.runs.progress import quiet
from harness.runs.safepoints import read
from harness.runs.trainer import trainers
from harness.studies.deploy import Latency, Options, Study, formats
from harness.studies.deploy.latency import need_compiler
from harness.studies.deploy.source import data_of_run, images_of, of_net, read_net
from harness.studies.distillation import Candidate, DistillationStudy
from harness.studies.study import ResumableResults
from lit_modules import nets, objectives
from lit_modules.classifier import LitClassifier
from lit_modules.quantization import EXTRA, post_training
from lit_modules.quantization.capture import captured
from lit_modules.quantized import NAME, Quantized

DATA, STUDENT = "Digits", "student"


def parser(data: Any = DATA) -> cli.Parser:
    """What can be chosen: data, a fresh student, what quantisation-aware training learns by, optimizer, trainer."""
    parser = cli.Parser("quantize.py", (__doc__ or "").split("\n", 1)[0], Options)
    parser.add_choice("data", datamodules.ImageData, datamodules, data)
    parser.add_choice("student", (nets.Net, nn.Module), nets, "LightNN", skip={"input_shape", "num_classes"})
    parser.add_choice("objective", (objectives.Objective, objectives.FeatureObjective), objectives, "CrossEntropy")
    parser.add_class("latency", Latency)
    parser.add_optimizer({"class_path": "Adam", "init_args": {"lr": 1e-4}})
    parser.add_trainer(strategies.NAMES, max_epochs=5, log_every_n_steps=10)
    return parser


class Builder:
    """What is made of the configuration."""

    def __init__(self, config: Namespace, data: Any, trainer: MakeTrainer) -> None:
        self.config, self.data, self.trainer, self.seed = config, data, trainer, config.seeds[0]
        self.latency, self.flag = cli.build(config.latency, "latency"), "student" if config.run is None else "run"
        self.checked: Quantized | None = None
        self.used: dict[str, int] = {}
        self.shape = {"input_shape": data.input_shape, "num_classes": data.num_classes}
        self.fits = {"every": config.checkpoint_every, "tensorboard": config.trainer.init_args["logger"] is not False}

    def fresh(self) -> tuple[LitClassifier, dict[str, Candidate]]:
        """A student that is still to be trained."""
        choice = self.config.student
        net = with_seed(self.seed, lambda: cli.build(choice, "student", **self.shape))
        rebuilt = spec(choice.class_path, cli.arguments(choice, "student", **self.shape))
        candidate = Candidate(net, rebuilt, "CrossEntropy", {"net": choice.name, **choice.init_args})
        return LitClassifier(net, self.data.num_classes, seed=self.seed), {STUDENT: candidate}

    def student(self, out: Path) -> tuple[nn.Module, Spec]:
        """The run's student, or one that is trained now, in the run's folder."""
        if self.config.run is not None:
            return self.read(self.config.run, "run")
        trainer = partial(self.trainer, max_epochs=self.config.student_epochs)
        stage = DistillationStudy(out, self.data, trainer, **self.fits).stage(self.seed, STUDENT, self.fresh)
        if any(facts["failed"] for facts in stage["runs"].values()):
            raise BadInput("student", self.config.student.name, "a net that Adam trains; its loss is not finite")
        return self.read(out / f"seed{self.seed}" / STUDENT, "out")

    def read(self, folder: str | Path, flag: str) -> tuple[nn.Module, Spec]:
        """The net in a user's folder, which fits the data, and how to rebuild it."""
        net, rebuilt = read_net(folder, flag, self.data.input_shape)
        with of_net(flag, folder):
            nets.check_fits(net, self.data.example, (self.data.num_classes,), flag)
        return net, rebuilt

    def teacher(self, objective: Any) -> nn.Module | None:
        """The net that goes on teaching, if the objective asks one, and one is named or stands beside the student."""
        folder = self.config.teacher
        if not objective.uses_teacher and folder is not None:
            raise BadInput("teacher", folder, f"none, as {self.config.objective.name} asks none; or --objective Hinton")
        if objective.uses_teacher and folder is None and self.config.run is not None:
            beside = Path(self.config.run).resolve().parent / "teacher"
            folder = beside if beside.is_dir() else None
        return None if folder is None else self.read(folder, "teacher")[0]

    def aware(self, net: nn.Module) -> Quantized:
        """The module of quantisation-aware training."""
        config = self.config
        objective = cli.build(config.objective, "objective")
        learning: dict[str, Any] = {"optimizer": cli.factory(config.optimizer, "optimizer")}
        if config.scheduler is not None:
            learning["scheduler"] = cli.factory(config.scheduler, "scheduler")
        learning |= {"seed": self.seed, "freeze_epoch": config.freeze_epoch}
        return Quantized(net, objective, self.teacher(objective), **self.shape, **learning)

    def int8(self, net: nn.Module, out: Path) -> nn.Module:
        """The int8 net of quantisation-aware training, which is not done twice."""
        module, folder = self.checked or self.aware(net), out / f"seed{self.seed}" / NAME
        best, checkpoint = folder / "best.pt", folder.with_suffix(".ckpt")
        if not best.exists():
            self.data.order_seed = self.seed
            trainer = partial(self.trainer, check_val_every_n_epoch=self.config.evaluate_every)
            fit_and_test(module, self.data, trainer, checkpoint, runs=[NAME], label=NAME, **self.fits)
            if module.failed:
                raise BadInput(
                    "optimizer", self.config.optimizer.name, f"settings that train {NAME}; its loss is not finite"
                )
            if job.is_main_process():
                folder.mkdir(exist_ok=True)
                with atomic(best) as temporary:
                    torch.save(module.best_state(), temporary)
        if job.is_main_process():
            checkpoint.unlink(missing_ok=True)
        if dist.is_initialized():
            dist.barrier()  # ranks of a launcher's go on to read what the first has written
        return module.net.int8(read(best))

    def check(self) -> None:
        """Build everything once, so that what can't work is refused before anything is trained."""
        config, trainer = self.config, self.trainer()
        strategy, chosen = trainer.strategy, config.trainer.init_args
        if config.run is not None and config.student != parser().parse([]).student:
            raise BadInput("student", config.student.name, "it left out: --run has the student")
        if (every := chosen["check_val_every_n_epoch"]) != 1:
            raise BadInput("trainer.check_val_every_n_epoch", every, "it left out; --evaluate_every says it")
        if (limit := chosen["limit_test_batches"]) is not None:
            raise BadInput(
                "trainer.limit_test_batches", limit, "it left out, or --data.test_size; all formats are tested alike"
            )
        epochs = chosen["max_epochs"]
        if epochs is not None and 0 <= epochs < config.evaluate_every:
            raise BadInput("evaluate_every", config.evaluate_every, f"at most --trainer.max_epochs, {epochs}")
        forked = type(strategy) is strategies.DDP and strategy.start_method != "spawn"
        if not (forked or isinstance(strategy, SingleDeviceStrategy)):
            raise BadInput("trainer.strategy", type(strategy).__name__, "ddp, or a single device")
        self.data.check_replicas(trainer.world_size)
        self.used = self.data.used(trainer)
        if config.run is None:
            net, value = self.fresh()[0].net, config.student.name
            nets.check_same_start(net, self.fresh()[0].net, "student")
            nets.check_fits(net, self.data.example, (self.data.num_classes,), "student")
        else:
            net, value = self.read(config.run, "run")[0], config.run
        with of_net(self.flag, value, "net"):
            module = self.aware(net)
            captured(copy.deepcopy(net).eval(), self.data.example.float())
        self.checked = None if config.run is None else module


def run(builder: Builder, kept: ResumableResults | None, out: Path) -> None:
    """Train what is to be trained, then export, check and measure."""
    config = builder.config
    net, rebuilt = builder.student(out)
    int8 = builder.int8(net, out)
    if kept is None:
        return

    def make() -> dict[str, nn.Module]:
        after = post_training(net, images_of(builder.data, "train", config.calibration_size)[0].split(128))
        rounded = formats.Rounded(copy.deepcopy(net), torch.bfloat16)
        return {"float32": net, "bfloat16": rounded, "int8-ptq": after, NAME: int8}

    Study(kept, rebuilt, *images_of(builder.data, "test")).run(make, builder.latency)


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line describes."""
    argv = sys.argv[1:] if argv is None else argv
    with cli.one_line_errors():
        command = parser(data_of_run(argv, DATA, datamodules.ImageData))
    with cli.one_line_errors(command), signals.handled(), quiet():
        config = command.parse(argv)
        if config.data is None:
            raise BadInput("run", config.run, "a folder in its run's, with config.yaml; or --data, what it learnt from")
        extras.need(*EXTRA)
        formats.need()
        need_compiler()
        strategies.register()
        trainer = trainers(config.trainer, None, strategies.NAMES)
        launch.join(trainer)
        data = cli.build(config.data, "data")
        with job.main_first("data"):
            data.prepare_data()
            data.setup()
        environment.limit_threads(data.input_shape)
        environment.keep_memory()
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        builder = Builder(config, data, trainer)
        builder.check()
        with session.opened("quantize", command, config) as out:
            kept = None
            if job.is_main_process():
                kept = ResumableResults("quantize", "format", out, command, config, threads=builder.latency.used)
                kept.header["data"] = {"name": data.name, **builder.used}
                kept.header["versions"] = environment.versions(*EXTRA[1:], *formats.EXTRA[1:])
            run(builder, kept, out)


if __name__ == "__main__":
    main()
