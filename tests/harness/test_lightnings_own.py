"""Lightning's loggers and callbacks, and anyone's, beside ours."""

import csv
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from experiments import kd
from lit_modules.distillation import Distillation
from tests.processes import Run

KD = ["--data", "Digits", "--data.train_size", "80", "--data.test_size", "40", "--only", "ce", "kd", "--seeds", "1"]
KD += ["--trainer.max_epochs", "3", "--trainer.log_every_n_steps", "1"]
LOGGER = "tests.harness.test_lightnings_own.Batches"


def test_a_logger_of_lightnings_has_every_value_and_the_hyperparameters(tmp_path: Path) -> None:
    out = tmp_path / "run"
    kd.main(
        [*KD, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "csv"), "--out", str(out)]
    )
    folder = tmp_path / "csv" / "run" / "seed0" / "students" / "version_0"
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    found = {name for row in rows for name, value in row.items() if value}
    assert {"kd/train/kd", "ce/val/acc", "kd/train/loss_epoch", "kd/test/acc"} <= found
    students = yaml.safe_load((folder / "hparams.yaml").read_text())["students"]
    assert students["kd"][1]["class_path"].endswith(".Hinton")
    assert list((out / "seed0" / "kd").glob("events.*"))  # TensorBoard's, too
    entry = json.loads((out / "results.json").read_text())["students"]["kd"]
    for name, tag in (("val/acc", "kd/val/acc"), ("train/loss", "kd/train/loss_epoch")):
        logged = [float(row[tag]) for row in rows if row[tag]]
        assert [each[name] for each in entry["epochs"][0]] == pytest.approx(logged, rel=1e-6)  # in float32


@pytest.mark.slow
@pytest.mark.extras("wandb")
def test_weights_and_biases_offline_has_a_run_for_each_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = ["--trainer.logger", "WandbLogger", "--trainer.logger.offline", "true"]
    logger += ["--trainer.logger.save_dir", str(tmp_path)]
    run = Run(kd.main, [*KD, *logger, "--out", str(tmp_path / "run")], log=tmp_path / "log")
    assert run.wait() == 0, run.output
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow")  # of SQLAlchemy's loader, which MLflow uses
@pytest.mark.extras("mlflow", "sqlalchemy", "alembic", "_cffi_backend")
def test_mlflow_s_data_base_has_a_run_for_each_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    logger = re.findall(r"`(--trainer.logger MLFlowLogger[^`]*)`", page)[0].split()
    monkeypatch.chdir(tmp_path)
    run = Run(kd.main, [*KD, *logger, "--out", str(tmp_path / "run")], log=tmp_path / "log")
    assert run.wait() == 0, run.output
    with sqlite3.connect("mlflow.db") as base:
        assert {*base.execute("select name from runs")} == {("run/seed0/teacher",), ("run/seed0/students",)}


BEST = "{class_path: ModelCheckpoint, init_args: {monitor: kd/val/acc, mode: max, save_last: true}}"
STOP = "{class_path: EarlyStopping, init_args: {monitor: kd/val/acc, mode: min, patience: 1, min_delta: 2}}"


def test_callbacks_work_in_the_stages_that_log_what_they_monitor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    kd.main([*KD, "--trainer.callbacks", f"[{BEST}, {STOP}]", "--out", str(out)])
    told = "".join(capsys.readouterr())
    assert "seed 0 teacher   without ModelCheckpoint, as it logs no kd/val/acc" in told
    results = json.loads((out / "results.json").read_text())
    assert len(results["teacher"]["epochs"][0]) == 3
    assert len(results["students"]["ce"]["epochs"][0]) == 2  # all students stop together
    folder = out / "seed0" / "checkpoints" / "students"
    last = torch.load(folder / "last.ckpt", weights_only=True)
    kept = torch.load(out / "seed0" / "kd" / "weights.pt", weights_only=True)
    for name, value in kept.items():
        assert torch.equal(last["state_dict"][f"students.kd.net.{name}"], value)
    found = Distillation.load_from_checkpoint(folder / "last.ckpt", teacher_weights=out / "seed0/teacher/weights.pt")
    assert torch.equal(next(found.students["kd"].net.parameters()), next(iter(kept.values())))
    kd.main(["--out", str(out), "--overwrite", "true", *KD, "--only", "ce"])
    assert not folder.exists() or not list(folder.iterdir())


class Batches(Callback):
    """A stranger's: writes what each step's batch is."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with (Path(trainer.default_root_dir) / "seen").open("a") as file:
            file.write(f"{trainer.global_step} {batch.count}\n")


def test_a_strangers_callback_sees_one_global_batch_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kd.main([*KD, "--data.batch_size", "30", "--trainer.callbacks", LOGGER, "--out", "run"])
    steps = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert steps == 2 * [[str(step), str(count)] for step, count in enumerate([30, 30, 20] * 3, 1)]
