"""Teacher and students are trained as each needs: their own settings."""

from pathlib import Path
from typing import Any

import pytest
import torch

from apprentice import replicas
from experiments import compare, kd
from harness.studies import budgets
from lit_modules.distillation import Distillation
from lit_modules.nets import ResNet
from lit_modules.objectives import RKD, CrossEntropy
from tests.commands import Refusal, nets, results, start
from tests.training import SHAPE, assert_same, digits, fit, net, weights

SMALL = [
    "--data.train_size", "150", "--data.test_size", "100", "--seeds", "[3]", "--only", "ce", "kd",
    "--trainer.max_epochs", "2", "--trainer.strategy", "auto", "--trainer.devices", "1",
]  # fmt: skip
OWN = ["--teacher_optimizer", "SGD", "--teacher_optimizer.lr", "0.05", "--teacher_scheduler", "OneCycleLR"]
OWN += ["--teacher_scheduler.max_lr", "0.1", "--teacher_batch_size", "40"]
ALL = ["--optimizer", "SGD", "--optimizer.lr", "0.05", "--scheduler", "OneCycleLR", "--scheduler.max_lr", "0.1"]
ALL += ["--data.batch_size", "40"]


def of(out: Path, *names: str) -> dict[str, object]:
    return {key: value for key, value in nets(out).items() if key.split("/")[1].split(".")[0] in names}


def test_a_teacher_learns_by_its_own_settings_and_students_by_theirs(tmp_path: Path) -> None:
    run, teachers, students = (tmp_path / name for name in ("run", "teachers", "students"))
    kd.main([*SMALL, *OWN, "--save_ckpt", "true", "--out", str(run)])
    kd.main([*SMALL, *ALL, "--out", str(teachers)])
    kd.main([*SMALL, "--teacher_ckpt", str(run / "seed3/teacher/weights.pt"), "--out", str(students)])
    assert_same(of(run, "teacher"), of(teachers, "teacher"))
    assert_same(of(run, "ce", "kd"), of(students, "ce", "kd"))
    facts = results(run)["teacher"]
    assert facts["train_flops"] == results(teachers)["teacher"]["train_flops"]


def test_an_option_alone_changes_the_students_class(tmp_path: Path) -> None:
    config = kd.parser().parse([*ALL[:4], "--optimizer.momentum", "0.9", "--teacher_optimizer.lr", "0.1"])
    assert config.teacher_optimizer.name == "SGD"
    assert {**config.optimizer.init_args, "lr": 0.1} == config.teacher_optimizer.init_args
    assert config.teacher_scheduler is None


@pytest.mark.slow
def test_a_teachers_batches_are_the_same_on_any_number_of_devices(tmp_path: Path) -> None:
    exact = [*SMALL[:11], *OWN, "--exact", "4"]
    for devices in (1, 3):
        start(tmp_path / str(devices), *exact, "--trainer.devices", str(devices)).check()
    assert_same(nets(tmp_path / "1"), nets(tmp_path / "3"))


def test_a_loaded_teacher_has_no_settings(tmp_path: Path, refusal: Refusal) -> None:
    kd.main([*SMALL, "--trainer.max_epochs", "1", "--out", str(tmp_path / "run")])
    loaded = ["--teacher_ckpt", str(tmp_path / "run/seed3/teacher/weights.pt")]
    for flags in (["--teacher_optimizer", "SGD"], ["--teacher_batch_size", "5"]):
        line = refusal(kd.main, *SMALL, *loaded, *flags)
        assert line == f"{' '.join(flags)}: expected a teacher that is trained here; this one is loaded"


def test_a_metric_by_path_is_that_of_the_same_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the table, read again by compare.py; beside it the accuracy."""
    path, run = "torchmetrics.classification.MulticlassF1Score", tmp_path / "run"
    kd.main([*SMALL, "--metric", path, "--metric.average", "macro", "--out", str(run)])
    kd.main([*SMALL, "--metric", "f1", "--out", str(tmp_path / "f1")])
    found, ours = results(run), results(tmp_path / "f1")
    assert found["metric"] == {"name": "test_MulticlassF1Score", "higher_is_better": True, "path": path}
    for name in ("ce", "kd"):
        mine, theirs = (facts["students"][name] for facts in (found, ours))
        assert mine["test_MulticlassF1Score"] == pytest.approx(theirs["test_f1"], abs=1e-6)
        assert mine["test_acc"] == theirs["test_acc"]
    capsys.readouterr()
    compare.main([str(run), "--out", str(tmp_path / "compared")])
    assert "MulticlassF1Score" in capsys.readouterr().out
    kd.main(["--out", str(run), "--resume", "true", "--seeds", "[3, 4]"])
    assert len(results(run)["students"]["kd"]["test_MulticlassF1Score"]) == 2


def test_a_students_seconds_are_so_many_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops after them, and is what one of so many steps is; a resumed fit keeps their number."""
    times = iter([10.0, 25.0, 1.0, 1.0])
    monkeypatch.setattr(budgets, "milliseconds", lambda step: next(times))
    one_batch = ["--data.batch_size", "50", "--trainer.max_epochs", "3"]
    kd.main([*SMALL, *one_batch, "--student_seconds", "0.05", "--out", str(tmp_path / "run")])
    students = results(tmp_path / "run")["students"]
    assert {name: student["trained_steps"] for name, student in students.items()} == {"ce": [5], "kd": [2]}
    loaded = ["--teacher_ckpt", str(tmp_path / "run/seed3/teacher/weights.pt")]
    for name, steps in (("ce", "5"), ("kd", "2")):
        out = tmp_path / name
        kd.main([*SMALL, *one_batch, *loaded, "--trainer.max_steps", steps, "--only", name, "--out", str(out)])
        assert_same(of(tmp_path / "run", name), of(out, name))
    page = (tmp_path / "run/results.md").read_text()
    assert "Steps, seed by seed: ce 5; kd 2." in page
    callback = budgets.StudentBudget(0.05)
    callback.load_state_dict({"steps": {"ce": 5, "kd": 2}})
    callback.on_train_start(None, None)  # type: ignore[arg-type]  # it times nothing
    assert callback.state_dict() == {"steps": {"ce": 5, "kd": 2}}


def test_students_seconds_end_no_teacher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of several has all of its epochs; a student without a whole one has no best epoch, and the page says so."""
    teachers = ["--teachers.big", "LightNN", "--taught_by.kd", "big", "--teacher_epochs", "3"]
    kd.main([*SMALL, *teachers, "--student_seconds", "1e-6", "--best_epoch", "val/acc", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "Steps, seed by seed: ce 1; kd 1." in said
    assert all(f"{name}  epoch 3/3" in said for name in ("teacher ", "teacher-big"))
    page = (tmp_path / "results.md").read_text()
    assert "What a student learns after its last whole epoch is not validated; without any it has its last" in page


def batch_norms(ema: float | None = None) -> Distillation:
    students = {"rkd": (net(ResNet, depth=8), RKD()), "ce": (net(ResNet, depth=8), CrossEntropy())}
    return Distillation(net(), students, SHAPE, ema=ema)


def test_a_rank_times_a_step_that_relates_rows_alone() -> None:
    """No other waits for it, of the global batch's statistics either."""
    module: Any = fit(batch_norms(), digits(), 2, callbacks=[budgets.StudentBudget(1e-6)])
    assert {run: done["steps"] for run, done in module.stopped.items()} == {"rkd": 1, "ce": 1}


def test_timing_leaves_random_states_and_the_last_step_is_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_a_step(step: Any) -> float:
        assert replicas.is_shard()
        step()
        torch.rand(3)
        return 25.0

    class Budget(budgets.StudentBudget):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            before = torch.get_rng_state()
            super().on_train_start(trainer, pl_module)
            assert torch.equal(torch.get_rng_state(), before)

    monkeypatch.setattr(budgets, "milliseconds", time_a_step)
    module, alone = batch_norms(0.5), batch_norms(0.5)
    fit(module, digits(), max_epochs=3, callbacks=[Budget(0.1)])
    fit(alone, digits(), max_epochs=3, max_steps=4)
    assert_same(weights(module), weights(alone))
    assert {done["steps"] for done in module.stopped.values()} == {4}
    assert {done["epochs"] for done in module.stopped.values()} == {1.333}
