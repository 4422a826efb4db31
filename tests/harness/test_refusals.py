"""What would fail in training is refused before it, in one line with the flag; what only looks odd is trained."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments import gpt, hardware, kd
from tests.commands import refused

KD = shlex.split("--teacher LightNN --seeds 1 --only kd --data.train_size 200 --trainer.max_epochs 1")
GPT = shlex.split(
    "--net.num_layers 1 --net.num_heads 1 --net.embed_dim 8 --data.block_size 8 --data.batch_size 4 "
    "--trainer.max_steps 4 --trainer.val_check_interval 2 --trainer.limit_val_batches 2 --trainer.limit_test_batches 2"
)
MODULE = """
import torch
from torch import nn
from lit_modules.objectives import Objective, Term


class Mine(nn.Module):
    def __init__(self, input_shape, num_classes):
        super().__init__()
        self.classes, size = num_classes, torch.Size(input_shape).numel()
        self.layer = self.made(size, num_classes)

    def made(self, size, classes):
        return nn.Linear(size, classes)

    def forward(self, x):
        return self.layer(x.flatten(1))


class Bare(Mine):
    def made(self, size, classes):
        return nn.Identity()

    def forward(self, x):
        return x.flatten(1)[:, : self.classes]


class Lazy(Mine):
    def made(self, size, classes):
        return nn.LazyLinear(classes)


class Frozen(Mine):
    def made(self, size, classes):
        return super().made(size, classes).requires_grad_(False)


class Detached(Mine):
    def forward(self, x):
        return super().forward(x).detach()


class Broken(Mine):
    def forward(self, x):
        raise KeyError("x")


class Unmade(Mine):
    def made(self, size, classes):
        raise RuntimeError("not today")


class Constant(Objective):
    uses_teacher = False

    def forward(self, student, teacher, labels):
        return {"one": Term(torch.ones(len(labels)), 1.0)}


class Empty(Constant):
    def forward(self, student, teacher, labels):
        return {}


class Wrong(Constant):
    def forward(self, student, teacher, labels):
        return {"one": teacher.logits}
"""
NETS = {
    "Bare": "Bare: expected a net with parameters; it has none",
    "Lazy": "Lazy: expected a net whose first weights are made with it, from the seed; layer.weight is of a lazy",
    "Frozen": "Frozen: expected a net that can be trained; all of its parameters are frozen",
    "Detached": "Detached: expected a net that can be trained; its logits have no gradient",
    "Broken": "Broken: expected a net that takes inputs (1, 8, 8), as this data has them; it says: KeyError: 'x'",
    "Unmade": "Unmade: expected options that it takes: not today",
}


@pytest.fixture(autouse=True)
def _mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "their_nets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("their_nets", None)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("key", ["student", "teacher"])
def test_nets_that_can_not_be_trained(key: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(kd.main, [*KD, f"--{key}", f"their_nets.{name}"], f"--{key} ", NETS[name], tmp_path, capsys)


@pytest.mark.parametrize("name", NETS)
def test_nets_that_can_not_be_measured(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--net", f"their_nets.{name}", "--only", "single", "--data.train_size", "200"]
    refused(hardware.main, flags, f"--net {name}: ", NETS[name], tmp_path, capsys)


OBJECTIVES = {
    "their_nets.Constant": "Constant: expected an objective whose loss depends on the student's outputs, by a term",
    "their_nets.Empty": "Empty: expected an objective whose loss depends on the student's outputs",
    "their_nets.Wrong": "Wrong: expected an objective for outputs such as these nets'; it says: 'NoneType' object has",
    "Hinton --variants.kd.kd_weight 0 --variants.kd.ce_weight 0": "Hinton: expected an objective whose loss depends",
}


@pytest.mark.parametrize("chosen", OBJECTIVES)
def test_objectives_that_train_nothing(chosen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*KD, "--variants.kd", *chosen.split()]
    refused(kd.main, flags, "--variants.kd ", OBJECTIVES[chosen], tmp_path, capsys)


STOP = "--trainer.callbacks EarlyStopping --trainer.callbacks.monitor"
TEACHER = "teacher: val/loss, val/acc, train/loss_epoch, train/acc_epoch"
STUDENTS = (
    "students: kd/val/loss, kd/val/acc, kd/train/kd_epoch, kd/train/ce_epoch, kd/train/loss_epoch, kd/train/acc_ep"
)
TRAINER = {
    "--trainer.val_check_interval 3": "at most 2, the batches of an epoch; --trainer.check_val_every_n_epoch null cou",
    f"{STOP} nonsense --trainer.callbacks.strict false": f"before it is looked at; {TEACHER}; {STUDENTS}",
    "--trainer.callbacks ModelCheckpoint --trainer.callbacks.monitor kd/acc": f"before it is looked at; {TEACHER}; ",
    f"{STOP} val/acc --data.validation_size 0": "; teacher: train/loss_epoch, train/acc_epoch; students: kd/train/kd_e",
    f"{STOP} loss": f"before it is looked at; {TEACHER}; ",  # logged every 10 steps, of which an epoch has 2
    f"{STOP} train/loss_epoch --trainer.callbacks.check_on_train_epoch_end false": "; teacher: val/loss, val/acc; stud",
    "--trainer.callbacks [LearningRateFinder]": "a callback for modules without .lr, as those of teacher and students",
}


@pytest.mark.parametrize("line", TRAINER)
def test_options_of_the_trainer(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(kd.main, [*KD, *line.split()], "--trainer.", TRAINER[line], tmp_path, capsys)


def test_a_monitor_of_the_only_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged = "; gpt: val/loss, val/bpc, val/perplexity"
    refused(
        gpt.main, [*GPT, *shlex.split(STOP), "loss"], "--trainer.callbacks.monitor loss: ", logged, tmp_path, capsys
    )


@pytest.mark.parametrize("line", [
    f"{STOP} loss --trainer.log_every_n_steps 2",
    pytest.param("--trainer.log_every_n_steps 0", marks=pytest.mark.slow),
    pytest.param("--trainer.val_check_interval 2", marks=pytest.mark.slow),
])  # fmt: skip
def test_what_stages_log_is_monitored(line: str, tmp_path: Path) -> None:
    kd.main([*KD, *shlex.split(line), "--out", str(tmp_path / "run")])
    assert (tmp_path / "run" / "results.json").exists()
