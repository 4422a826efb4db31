"""What quantize.py builds: a trained student, its teacher, its int8 net, and the net of each number format."""

import copy
import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput
from apprentice.weights import read_saved
from deploy.int8 import quantize_post_training
from deploy.int8.capture import capture
from deploy.int8.quantization_aware import NAME, QuantizationAware
from deploy.net_path import net_path, teachers_beside
from deploy.writers import RoundedNet
from harness import cli
from harness.cli import sources
from harness.reports.hparams import log_row
from harness.runs.callbacks import check_callbacks
from harness.runs.facts import KEYS, NetFacts, Spec
from harness.runs.files import atomic
from harness.runs.folders import check_samples
from harness.runs.launch import is_main_process
from harness.runs.nets import load_net, read_expects, read_facts, read_spec
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
from harness.studies.fits import fit, fit_and_test, wait_for_main
from lit_modules.classifier import LitClassifier
from lit_modules.nets.base import check_fits
from lit_modules.training.optimization import adam

STUDENT = "student"
ADAM, TRAINER = "torch.optim.Adam", "lightning.pytorch.Trainer"


class NetDescription(NamedTuple):
    """What a net's folder says of it."""

    spec: Spec  # how it is rebuilt
    facts: NetFacts  # what users of it need to know


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
    images, labels = data.samples(split, chosen, torch.float32)
    return images, labels


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

    def student(self) -> tuple[nn.Module, NetDescription]:
        """Return the student of `run`, or one that is trained now, and what its `net.yaml` says.

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
        return net, NetDescription(spec, facts or self.run.net_facts())

    def read(self, folder: str | Path, flag: str) -> tuple[nn.Module, Spec]:
        """Load a folder's net in float32 and eval mode, and its `net.yaml`; BadInput if broken or unfit."""
        spec, net = read_spec(folder, flag), load_net(folder, flag).float()
        shape = tuple(self.data.input_shape)
        if (net_shape := tuple(spec["init_args"].get("input_shape", shape))) != shape:
            raise BadInput(flag, folder, f"a net for inputs {shape}, as this data has them; it is for {net_shape}")
        check_expects(self.data, read_expects(folder), flag)
        match_classes(self.run, net, flag, folder, may_move=flag == "teacher")  # what is exported stays as it is
        with of_net(flag, folder):
            check_fits(net, self.data.example, (*self.data.label_shape, self.data.num_classes), flag)
        return net, spec

    def teacher(self, objective: Any) -> nn.Module | None:
        """Return the teacher, if the objective needs one: `teacher`, or that beside the student of `run`."""
        folder = self.config.teacher
        if not objective.uses_teacher and folder is not None:
            raise BadInput(
                "teacher", folder, f"not allowed with `objective {self.config.objective.name}`, which asks none"
            )
        if objective.uses_teacher and folder is None and self.config.run is not None:
            beside, *others = teachers_beside(self.config.run)
            if others:
                names = ", ".join(path.name for path in (beside, *others))
                raise BadInput("run", self.config.run, f"a student of one teacher, or `teacher FOLDER`; it has {names}")
            folder = beside if beside.is_dir() else None
        return None if folder is None else self.read(folder, "teacher")[0]

    def aware(self, net: nn.Module) -> QuantizationAware:
        """Build the module of quantisation-aware training."""
        objective = cli.build(self.config.objective, "objective")
        options: dict[str, Any] = {"seed": self.seed, "freeze_epoch": self.config.freeze_epoch}
        options |= {**learner_options(self.config, self.data), "labelled": self.data.shows_labels}
        return QuantizationAware(net, objective, self.teacher(objective), **self.sizes, **options)

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
        folder = net_path(self.config.run).run
        settings = folder / "config.yaml"
        data = sources.load(settings, "run").get("data") if settings.is_file() else None
        if data == self.run.parser.as_dict(self.config)["data"]:
            check_samples(folder, self.run.samples, "train a student of these")

    def formats(self, net: nn.Module, int8: nn.Module) -> dict[str, nn.Module]:
        """Return the net of each format, in eval mode on the CPU."""
        images, _ = images_of(self.data, "train", self.config.calibration_size)
        rounded = RoundedNet(copy.deepcopy(net), torch.bfloat16)
        ptq = quantize_post_training(net, images.split(128))
        return {"float32": net, "bfloat16": rounded, "int8-ptq": ptq, NAME: int8}
