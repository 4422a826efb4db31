"""What the deploy study quantises: its options, a trained student and its data, its teacher, and its int8 net."""

import copy
import io
import logging
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput
from apprentice.weights import read_saved
from harness import cli
from harness.cli import sources
from harness.cli.classes import import_class
from harness.reports.hparams import log_row
from harness.runs.callbacks import check_callbacks
from harness.runs.facts import KEYS
from harness.runs.files import atomic
from harness.runs.folders import check_samples
from harness.runs.launch import is_main_process
from harness.runs.nets import Saved, Spec, load_net, place_of, read_expects, read_facts, read_spec, teachers_beside
from harness.runs.plans import Arm, FitPlan
from harness.runs.progress import progress
from harness.runs.session import Session
from harness.studies.choices import (
    build_net,
    check_batch_size,
    check_expects,
    check_net,
    judged_by,
    learner_options,
    match_classes,
)
from harness.studies.deploy import formats
from harness.studies.fits import fit, fit_and_test, wait_for_main
from lit_modules import nets
from lit_modules.classifier import LitClassifier
from lit_modules.learner import adam
from lit_modules.quantization import quantize_post_training
from lit_modules.quantization.capture import capture
from lit_modules.quantized import NAME, Quantized

STUDENT = "student"
ADAM, TRAINER = "torch.optim.Adam", "lightning.pytorch.Trainer"


@dataclass
class Options(cli.OneSeedOptions):
    """Options of the study.

    Args:
        exact: none; int8 is another net than the one that was trained.
        run: a student's folder, such as RUN/seed0/kd; when not given, one is trained.
        teacher: its teacher's folder, for an objective that asks it; RUN/seed0/teacher if that is there.
        student_epochs: of a student that is trained here, by Adam with a learning rate of 0.001.
        freeze_epoch: from this epoch on, counted from 0, ranges and BatchNorm's statistics stay as they are.
        evaluate_every: epochs from one int8 validation to the next.
        calibration_size: training samples that post-training quantisation takes its ranges from.
    """

    run: str | None = None
    teacher: str | None = None
    student_epochs: int = 10
    freeze_epoch: int = 2
    evaluate_every: int = 1
    calibration_size: int = 512
    why_one: ClassVar[str] = "one student is deployed"
    idle: ClassVar[Collection[str]] = ("num_classes",)
    why_inexact: ClassVar[str] = "ranges are the global batch's, not a shard's"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("student_epochs", "freeze_epoch", "evaluate_every", "calibration_size"):
            if vars(self)[name] < 1:
                raise BadInput(name, vars(self)[name], "a whole number, at least 1")
        if self.run is not None and self.student_epochs != Options.student_epochs:
            expected = "it left out: the student in --run is trained already"
            raise BadInput("student_epochs", self.student_epochs, expected)


def data_of_run(argv: Sequence[str], default: Any, kind: type) -> Any:
    """Return the default of `--data`: that of the run which the flags or their files name, as its config.yaml has it.

    `default` where no run is named, None where the run has no such file; BadInput if the data are not of class `kind`.
    """
    runs = [layer["run"].value for layer in sources.read(argv)[0] if "run" in layer]
    run = runs[-1] if runs else None
    if not isinstance(run, str):
        return default
    settings = place_of(run).run / "config.yaml"
    data = sources.load(settings, "run").get("data") if settings.is_file() else None
    if isinstance(data, dict) and "class_path" in data:
        try:
            import_class(data["class_path"], "data", (kind,))
        except BadInput as fault:
            raise BadInput("run", run, f"a student of images; its run's data is {fault.value}") from None
    return data


@contextmanager
def of_net(flag: str, value: object, *others: str) -> Iterator[None]:
    """Turn errors of torch.export and torchao about a net, and those of `others`, into a BadInput of its flag."""
    output = io.StringIO()
    logging.disable(logging.ERROR)
    try:
        with redirect_stderr(output):  # where it fails, torch.export prints the whole graph
            yield
        sys.stderr.write(output.getvalue())
    except BadInput as fault:
        if fault.argument.partition(".")[0] not in {flag, *others}:
            raise
        raise BadInput(flag, value, fault.expected) from None
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(flag, value, f"a net that can be quantised; it says: {cause}") from error
    finally:
        logging.disable(logging.NOTSET)


def images_of(data: Any, split: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    """Return images of a data module's split, normalised, float32 (N, C, H, W), and their labels (N,).

    Of `count` images, drawn by the data's seed: the first of a sorted folder are of one class.
    """
    size = data.sizes[split]
    chosen = torch.arange(size) if count is None else keyed.permutation(size, keyed.fold_in(data.seed, 5))[:count]
    return data.samples(split, chosen, torch.float32)


class Builder:
    """Makes nets and modules from the configuration."""

    def __init__(self, run: Session) -> None:
        self.run, self.config, self.data, self.seed = run, run.config, run.data, run.config.seeds[0]
        self.sizes: dict[str, Any] = {"input_shape": run.data.input_shape, "num_classes": run.data.num_classes}

    def fresh(self) -> LitClassifier:
        """Build the module of a student that is trained here."""
        net = build_net(self.run, STUDENT, self.seed)
        return LitClassifier(net, self.data.num_classes, seed=self.seed)

    def train(self) -> None:
        """Train a student, unless that is done; BadInput if it fails."""
        epochs = self.config.student_epochs
        trainer = cli.Choice(TRAINER, {**self.config.trainer.init_args, "max_epochs": epochs})
        settings = {"trainer": trainer, "optimizer": cli.Choice(ADAM, dict(adam.keywords)), "scheduler": None}
        plan = FitPlan(self.seed, STUDENT, (Arm(STUDENT, STUDENT),), epochs)
        if fit(self.run.with_settings(**settings), plan, lambda _: self.fresh()).fault(STUDENT):
            raise BadInput(STUDENT, self.config.student.name, "a net that Adam trains; its loss is not finite")

    def student(self) -> tuple[nn.Module, Saved]:
        """Return the student of `--run`, or one that is trained now, and what its `net.yaml` says.

        What that of an older version lacks is said of the data.
        """
        folder, flag = self.config.run, "run"
        if folder is None:
            self.train()
            folder, flag = self.run.out / f"seed{self.seed}" / STUDENT, "out"
        net, spec = self.read(folder, flag)
        facts = read_facts(folder, flag)
        if facts is None:
            self.run.tell(f"{folder}/net.yaml, of an older version, lacks {', '.join(KEYS[1:])}: they are those of now")
        return net, Saved(spec, facts or self.run.net_facts())

    def read(self, folder: str | Path, flag: str) -> tuple[nn.Module, Spec]:
        """Load a folder's net in float32 and eval mode, and its `net.yaml`; BadInput if broken or unfit."""
        spec, net = read_spec(folder, flag), load_net(folder, flag).float()
        shape = tuple(self.data.input_shape)
        if (net_shape := tuple(spec["init_args"].get("input_shape", shape))) != shape:
            raise BadInput(flag, folder, f"a net for inputs {shape}, as this data has them; it is for {net_shape}")
        check_expects(self.data, read_expects(folder), flag)
        match_classes(self.run, net, flag, folder, may_move=flag == "teacher")  # what is exported stays as it is
        with of_net(flag, folder):
            nets.check_fits(net, self.data.example, (*self.data.label_shape, self.data.num_classes), flag)
        return net, spec

    def teacher(self, objective: Any) -> nn.Module | None:
        """Return the teacher, if the objective needs one: `--teacher`, or that beside the student of `--run`."""
        folder = self.config.teacher
        if not objective.uses_teacher and folder is not None:
            raise BadInput("teacher", folder, f"none, as {self.config.objective.name} asks none; or --objective Hinton")
        if objective.uses_teacher and folder is None and self.config.run is not None:
            beside, *others = teachers_beside(self.config.run)
            if others:
                names = ", ".join(path.name for path in (beside, *others))
                raise BadInput("run", self.config.run, f"a student of one teacher, or --teacher FOLDER; it has {names}")
            folder = beside if beside.is_dir() else None
        return None if folder is None else self.read(folder, "teacher")[0]

    def aware(self, net: nn.Module) -> Quantized:
        """Build the module of quantisation-aware training."""
        objective = cli.build(self.config.objective, "objective")
        options: dict[str, Any] = {"seed": self.seed, "freeze_epoch": self.config.freeze_epoch}
        options |= {**learner_options(self.config, self.data), "labelled": self.data.labelled is None}
        return Quantized(net, objective, self.teacher(objective), **self.sizes, **options)

    def int8(self, net: nn.Module) -> nn.Module:
        """Train the int8 net of quantisation-aware training, unless that is done."""
        module, folder = self.aware(net), self.run.out / f"seed{self.seed}" / NAME
        best, checkpoint = folder / "best.pt", folder.with_suffix(".ckpt")
        if not best.exists():
            self.data.order_seed = self.seed
            arm, options = Arm(NAME, STUDENT, self.config.objective), self.config.trainer.init_args
            trainer = {"check_val_every_n_epoch": self.config.evaluate_every}
            plan = FitPlan(self.seed, NAME, (arm,), options["max_epochs"], trainer=trainer, title=NAME)
            outcome = fit_and_test(self.run, plan, module, show=progress(NAME))
            if module.failed:
                chosen = self.config.optimizer.name
                raise BadInput("optimizer", chosen, f"settings that train {NAME}; its loss is not finite")
            if is_main_process():
                folder.mkdir(exist_ok=True)
                spec = read_spec(self.config.run or self.run.out / f"seed{self.seed}" / STUDENT)
                if self.run.tensorboard:
                    figures = {"test_acc": outcome.scores[f"{NAME}/test/acc"]}
                    log_row(self.run, self.seed, arm, spec, figures, judged_by(self.config, self.data).score)
                with atomic(best) as temporary:
                    content = {"epoch": module.best_epoch, "net": spec, "state_dict": module.best_state()}
                    torch.save(content, temporary)
        if is_main_process():
            checkpoint.unlink(missing_ok=True)
        wait_for_main()
        saved = read_saved(best, "out", f"the best state of {NAME}, or no such file, and it is trained")
        return module.net.int8(saved["state_dict"])

    def check(self) -> None:
        """Build everything once; BadInput if something can't be trained or quantised."""
        trainer = self.run.checked_trainer()
        if self.config.run is None:
            check_net(self.run, STUDENT, trainer)
            module, flag, value = self.fresh(), STUDENT, self.config.student.name
            check_batch_size(self.run, module)
            check_callbacks(self.run, trainer, {STUDENT: module})
            net = module.net
        else:
            (net, _), flag, value = self.read(self.config.run, "run"), "run", self.config.run
            self._check_samples()
        with of_net(flag, value, "net"):
            aware = self.aware(net)
            capture(copy.deepcopy(net).eval(), self.data.example.float())
        check_callbacks(self.run, self.run.trainer(check_val_every_n_epoch=self.config.evaluate_every), {NAME: aware})

    def _check_samples(self) -> None:
        """Raise BadInput if the data are set as those of the student's run, and have other samples now."""
        folder = place_of(self.config.run).run
        settings = folder / "config.yaml"
        data = sources.load(settings, "run").get("data") if settings.is_file() else None
        if data == self.run.parser.as_dict(self.config)["data"]:
            check_samples(folder, self.run.samples, "train a student of these")

    def formats(self, net: nn.Module, int8: nn.Module) -> dict[str, nn.Module]:
        """Return the net of each format, in eval mode on the CPU."""
        images, _ = images_of(self.data, "train", self.config.calibration_size)
        rounded = formats.Rounded(copy.deepcopy(net), torch.bfloat16)
        ptq = quantize_post_training(net, images.split(128))
        return {"float32": net, "bfloat16": rounded, "int8-ptq": ptq, NAME: int8}
