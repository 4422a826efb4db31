"""What the deploy study quantises: a trained student, its teacher, and the int8 net of quantisation-aware training."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apprentice.errors import BadInput
from harness import config as cli
from harness.runs.files import atomic
from harness.runs.fit import fit_and_test
from harness.runs.launch import is_main_process
from harness.runs.nets import Spec
from harness.runs.safepoints import read
from harness.runs.session import Session
from harness.studies.deploy import formats
from harness.studies.deploy.source import images_of, of_net, read_net
from harness.studies.fits import Candidate, check_net, failure, learning, make_candidate, train, wait_for_main
from lit_modules import nets
from lit_modules.classifier import LitClassifier
from lit_modules.quantization import post_training
from lit_modules.quantization.capture import captured
from lit_modules.quantized import NAME, Quantized

STUDENT = "student"


class Builder:
    """Makes nets and modules from the configuration."""

    def __init__(self, run: Session) -> None:
        self.run, self.config, self.data, self.seed = run, run.config, run.data, run.config.seeds[0]
        self.sizes: dict[str, Any] = {"input_shape": run.data.input_shape, "num_classes": run.data.num_classes}
        self.checked: Quantized | None = None

    def fresh(self) -> tuple[LitClassifier, dict[str, Candidate]]:
        """The module of a student that is trained here."""
        options = {"net": self.config.student.name, **self.config.student.init_args}
        candidate = make_candidate(self.run, STUDENT, self.seed, "CrossEntropy", options)
        return LitClassifier(candidate.net, self.data.num_classes, seed=self.seed), {STUDENT: candidate}

    def student(self) -> tuple[nn.Module, Spec]:
        """The student of `--run`, or one that is trained now, and how to rebuild it."""
        if self.config.run is not None:
            return self.read(self.config.run, "run")
        if failure(train(self.run, self.seed, STUDENT, self.fresh, max_epochs=self.config.student_epochs), STUDENT):
            raise BadInput(STUDENT, self.config.student.name, "a net that Adam trains; its loss is not finite")
        return self.read(self.run.out / f"seed{self.seed}" / STUDENT, "out")

    def read(self, folder: str | Path, flag: str) -> tuple[nn.Module, Spec]:
        """A folder's net, which fits the data, and how to rebuild it."""
        net, spec = read_net(folder, flag, self.data.input_shape)
        with of_net(flag, folder):
            nets.check_fits(net, self.data.example, (self.data.num_classes,), flag)
        return net, spec

    def teacher(self, objective: Any) -> nn.Module | None:
        """The teacher, if the objective needs one: `--teacher`, or that beside the student of `--run`."""
        folder = self.config.teacher
        if not objective.uses_teacher and folder is not None:
            raise BadInput("teacher", folder, f"none, as {self.config.objective.name} asks none; or --objective Hinton")
        if objective.uses_teacher and folder is None and self.config.run is not None:
            beside = Path(self.config.run).resolve().parent / "teacher"
            folder = beside if beside.is_dir() else None
        return None if folder is None else self.read(folder, "teacher")[0]

    def aware(self, net: nn.Module) -> Quantized:
        """The module of quantisation-aware training."""
        objective = cli.build(self.config.objective, "objective")
        options: dict[str, Any] = {"seed": self.seed, "freeze_epoch": self.config.freeze_epoch}
        options |= learning(self.config, self.data)
        return Quantized(net, objective, self.teacher(objective), **self.sizes, **options)

    def int8(self, net: nn.Module) -> nn.Module:
        """The int8 net of quantisation-aware training, which a resumed run does not repeat."""
        module, folder = self.checked or self.aware(net), self.run.out / f"seed{self.seed}" / NAME
        best, checkpoint = folder / "best.pt", folder.with_suffix(".ckpt")
        if not best.exists():
            self.data.order_seed = self.seed
            trainer = partial(self.run.trainer, check_val_every_n_epoch=self.config.evaluate_every)
            fits = {"every": self.config.checkpoint_every, "tensorboard": self.run.tensorboard}
            fit_and_test(module, self.data, trainer, checkpoint, runs=[NAME], label=NAME, **fits)
            if module.failed:
                expected = f"settings that train {NAME}; its loss is not finite"
                raise BadInput("optimizer", self.config.optimizer.name, expected)
            if is_main_process():
                folder.mkdir(exist_ok=True)
                with atomic(best) as temporary:
                    torch.save(module.best_state(), temporary)
        if is_main_process():
            checkpoint.unlink(missing_ok=True)
        wait_for_main()
        return module.net.int8(read(best))

    def check(self) -> None:
        """Build everything once.

        Raises:
            BadInput: something can't be trained or quantised.
        """
        trainer = self.run.checked_trainer()
        if self.config.run is None:
            check_net(self.run, STUDENT, trainer)
            net, flag, value = self.fresh()[0].net, STUDENT, self.config.student.name
        else:
            (net, _), flag, value = self.read(self.config.run, "run"), "run", self.config.run
        with of_net(flag, value, "net"):
            module = self.aware(net)
            captured(copy.deepcopy(net).eval(), self.data.example.float())
        self.checked = None if self.config.run is None else module

    def formats(self, net: nn.Module, int8: nn.Module) -> dict[str, nn.Module]:
        """The net of each format, in eval mode on the CPU."""
        images, _ = images_of(self.data, "train", self.config.calibration_size)
        rounded = formats.Rounded(copy.deepcopy(net), torch.bfloat16)
        return {"float32": net, "bfloat16": rounded, "int8-ptq": post_training(net, images.split(128)), NAME: int8}
