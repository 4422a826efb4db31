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
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

import datamodules
import strategies
from apprentice import cli, environment, extras, interrupts, invocation, job, launches
from apprentice.checkpoints import fitting, read, read_weights
from apprentice.cli.imports import imported
from apprentice.cli.sources import flags, load
from apprentice.deploying import Latency, Options, Study, formats
from apprentice.deploying.latency import need_compiler
from apprentice.errors import BadInput
from apprentice.exports import Spec, load_net, read_spec, save_net, spec
from apprentice.files import atomic
from apprentice.keyed import seeded
from apprentice.measuring.kept import Kept
from apprentice.progress import quiet
from apprentice.stages import MakeTrainer, fit_and_test
from apprentice.trainers import trainers
from lit_modules import nets, objectives
from lit_modules.classifier import LitClassifier
from lit_modules.learner import Learner
from lit_modules.quantization import EXTRA, post_training
from lit_modules.quantized import NAME, Quantized


def parser() -> cli.Parser:
    """What can be chosen: data, a fresh student, what quantisation-aware training learns by, optimizer, trainer."""
    parser = cli.Parser("quantize.py", (__doc__ or "").split("\n", 1)[0], Options)
    parser.add_choice("data", datamodules.ImageData, datamodules, "Digits")
    parser.add_choice("student", (nets.Net, nn.Module), nets, "LightNN", skip={"input_shape", "num_classes"})
    parser.add_choice("objective", (objectives.Objective, objectives.FeatureObjective), objectives, "CrossEntropy")
    parser.add_class("latency", Latency)
    parser.add_optimizer({"class_path": "Adam", "init_args": {"lr": 1e-4}})
    parser.add_trainer(strategies.NAMES, max_epochs=5, log_every_n_steps=10)
    return parser


def with_data_of_run(argv: Sequence[str]) -> list[str]:
    """The flags, and before them the data that the student's run was on: what is given beside it changes that."""
    run = flags(argv).get("run")
    settings = Path(run).parent.parent / "config.yaml" if isinstance(run, str) else None
    if settings is None or not settings.is_file():
        return list(argv)
    return ["--data", json.dumps(load(settings, "run").get("data", "Digits")), *argv]


Save = Callable[[Any, Path], None]
DONE = "weights.pt"  # what a fit leaves last


class Wiring:
    """What is made of the configuration."""

    def __init__(self, config: Namespace, data: Any, trainer: MakeTrainer) -> None:
        self.config, self.data, self.trainer, self.seed = config, data, trainer, config.seeds[0]
        self.shape = {"input_shape": data.input_shape, "num_classes": data.num_classes}
        self.learning: dict[str, Any] = {"optimizer": cli.factory(config.optimizer, "optimizer")}
        if config.scheduler is not None:
            self.learning["scheduler"] = cli.factory(config.scheduler, "scheduler")

    def fresh(self) -> tuple[nn.Module, Spec]:
        """A student that is still to be trained."""
        choice = self.config.student
        net = seeded(self.seed, lambda: cli.build(choice, "student", **self.shape))
        return net, spec(choice.class_path, cli.arguments(choice, "student", **self.shape))

    def student(self) -> tuple[nn.Module, Spec]:
        """The run's student, in float32."""
        folder = Path(self.config.run)
        found = read_spec(folder, "run")
        shape = found["init_args"].get("input_shape", list(self.data.input_shape))
        if tuple(shape) != tuple(self.data.input_shape):
            raise BadInput("data", self.data.name, f"images of {tuple(shape)}, as the student in {folder} takes")
        net = imported(found["class_path"], "run", (nn.Module,))(**found["init_args"])
        path = str(folder / "weights.pt")
        net.load_state_dict(fitting(net.state_dict(), read_weights(path, "run"), path, "run"))
        return net.eval(), found

    def teacher(self) -> nn.Module | None:
        """The net that goes on teaching, if one is named or stands beside the student."""
        folder = self.config.teacher
        if folder is None and self.config.run is not None:
            beside = Path(self.config.run).parent / "teacher"
            folder = beside if beside.is_dir() else None
        if folder is None:
            return None
        read_spec(Path(folder), "teacher")
        read_weights(str(Path(folder) / "weights.pt"), "teacher")
        return load_net(folder).float()

    def aware(self, net: nn.Module) -> Quantized:
        """The module of quantisation-aware training."""
        objective = cli.build(self.config.objective, "objective")
        teacher = self.teacher() if objective.uses_teacher else None
        return Quantized(
            net, objective, teacher, **self.shape, **self.learning, seed=self.seed,
            freeze_epoch=self.config.freeze_epoch,
        )  # fmt: skip


def fitted(wiring: Wiring, out: Path, name: str, make: Callable[[], Learner], save: Save, **settings: Any) -> Path:
    """The folder of what a fit has left, which is not done twice.

    No backward runs in this process where ranks are forked from it: after torch.export they could run none.
    """
    config, folder = wiring.config, out / f"seed{wiring.seed}" / name
    if not (folder / DONE).exists():
        wiring.data.order_seed = wiring.seed
        module, checkpoint = make(), folder.with_suffix(".ckpt")
        fit_and_test(
            module, wiring.data, partial(wiring.trainer, **settings), checkpoint, runs=[name],
            every=config.checkpoint_every, tensorboard=config.trainer.init_args["logger"] is not False, label=name,
        )  # fmt: skip
        if module.failed:
            raise BadInput("optimizer", config.optimizer.name, f"settings that train {name}; its loss is not finite")
        if job.is_main_process():
            folder.mkdir(exist_ok=True)
            save(module, folder)
            checkpoint.unlink(missing_ok=True)
    if dist.is_initialized():
        dist.barrier()  # ranks of a launcher's go on to read what the first has written
    return folder


def trained(wiring: Wiring, out: Path) -> tuple[nn.Module, Spec]:
    """The student to quantise: the run's, or one that is trained now, in the run's folder."""
    if wiring.config.run is not None:
        return wiring.student()
    net, rebuilt = wiring.fresh()
    folder = fitted(
        wiring, out, "student", lambda: LitClassifier(net, wiring.data.num_classes, seed=wiring.seed),
        lambda _module, folder: save_net(net, rebuilt, folder), max_epochs=wiring.config.student_epochs,
    )  # fmt: skip
    return load_net(folder), rebuilt


def quantised(wiring: Wiring, net: nn.Module, out: Path) -> nn.Module:
    """The int8 net of quantisation-aware training."""

    def save(module: Quantized, folder: Path) -> None:
        with atomic(folder / DONE) as temporary:
            torch.save(module.best_state(), temporary)

    module = wiring.aware(net)
    folder = fitted(
        wiring, out, NAME, lambda: module, save, check_val_every_n_epoch=wiring.config.evaluate_every
    )  # fmt: skip
    return module.net.int8(read(folder / DONE))


def run(config: Namespace, wiring: Wiring, kept: Kept | None, out: Path) -> None:
    """Train what is to be trained, then export, check and measure."""
    net, rebuilt = trained(wiring, out)
    int8 = quantised(wiring, net, out)
    if kept is None:
        return
    latency, net = cli.build(config.latency, "latency"), net.float().cpu().eval()
    test = wiring.data.split("test")
    images = wiring.data.normalize(test.take(torch.arange(len(test.labels)))[0].cpu(), torch.float32)
    train = wiring.data.split("train")
    rows = torch.arange(min(config.calibration_size, len(train.labels)))
    calibration = wiring.data.normalize(train.take(rows)[0].cpu(), torch.float32)

    def make() -> dict[str, nn.Module]:
        return {
            "float32": net,
            "bfloat16": formats.Rounded(copy.deepcopy(net), torch.bfloat16),
            "int8-ptq": post_training(net, calibration.split(128)),
            NAME: int8,
        }

    Study(kept, rebuilt, images, test.labels.cpu()).run(make, latency)


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the command line describes."""
    command = parser()
    with cli.one_line_errors(command), interrupts.handled(), quiet():
        config = command.parse(with_data_of_run(sys.argv[1:] if argv is None else argv))
        extras.need(*EXTRA)
        formats.need()
        strategies.register()
        trainer = trainers(config.trainer, None, strategies.NAMES)
        check(config, trainer())
        launches.join(trainer)
        data = cli.build(config.data, "data")
        with job.main_first("data"):
            data.prepare_data()
            data.setup()
        environment.limit_threads(data.input_shape)
        environment.keep_memory()
        torch.backends.cudnn.allow_tf32 = False  # float32 means float32
        wiring = Wiring(config, data, trainer)
        wiring.aware(wiring.fresh()[0] if config.run is None else wiring.student()[0])  # refused now, if it can't be
        with invocation.opened("quantize", command, config) as out:
            kept = Kept("quantize", "format", out, command, config) if job.is_main_process() else None
            if kept is not None:
                kept.header["versions"] = environment.versions(*EXTRA[1:], *formats.EXTRA[1:])
            run(config, wiring, kept, out)


def check(config: Namespace, trainer: Trainer) -> None:
    """Raise BadInput where int8 can't be trained, would never be evaluated, or latency can't be measured so."""
    cli.build(config.latency, "latency")
    need_compiler()
    epochs, strategy = config.trainer.init_args["max_epochs"], trainer.strategy
    if epochs is not None and 0 <= epochs < config.evaluate_every:
        raise BadInput("evaluate_every", config.evaluate_every, f"at most --trainer.max_epochs, {epochs}")
    forked = type(strategy) is strategies.DDP and strategy.start_method != "spawn"
    if not (forked or isinstance(strategy, SingleDeviceStrategy)):
        raise BadInput("trainer.strategy", type(strategy).__name__, "ddp, or a single device")


if __name__ == "__main__":
    main()
