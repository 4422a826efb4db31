"""Teacher and students are trained as each needs: their own settings."""

from pathlib import Path

import pytest

from experiments import compare, kd
from tests.commands import Refusal, nets, results, start
from tests.training import assert_same

SMALL = [
    "--data.train_size", "150", "--data.test_size", "100", "--seeds", "[3]", "--only", "ce", "kd",
    "--trainer.max_epochs", "2", "--trainer.strategy", "auto", "--trainer.devices", "1",
    "--data", "Digits",
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
    config = kd.parser().parse(
        ["--data", "Digits", *ALL[:4], "--optimizer.momentum", "0.9", "--teacher_optimizer.lr", "0.1"]
    )
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
