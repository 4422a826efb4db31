"""What TensorBoard shows is what was trained: read back from the event files."""

import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from experiments import kd
from harness.runs.tensorboard import RunsLogger

RUNS = ("teacher", "ce", "kd")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracking") / "run"
    flags = ["--only", "ce", "kd", "--variants.kd.temperature", "4", "--seeds", "1", "--trainer.max_epochs", "2"]
    kd.main([*flags, "--teacher", "LightNN", "--trainer.log_every_n_steps", "4", "--out", str(folder)])
    return folder


def events(out: Path, run: str) -> EventAccumulator:
    found = EventAccumulator(str(out / "seed0" / run), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def test_the_same_tags_for_teacher_and_students(out: Path) -> None:
    common = {"train/loss", "train/acc", "train/loss_epoch", "train/acc_epoch", "val/loss", "val/acc", "test/loss"}
    common |= {"test/acc", "test/correct", "cost/parameters", "cost/train_flops", "cost/step_ms"}
    for run in RUNS:
        tags = set(events(out, run).Tags()["scalars"])
        assert common <= tags, run
        assert {f"test_class_acc/{i}" for i in range(10)} <= tags
        assert events(out, run).Tags()["images"] == ["test/confusion"]
    assert {"train/kd", "train/ce"} <= set(events(out, "kd").Tags()["scalars"])
    assert [e.step for e in events(out, "kd").Scalars("train/loss")] == [3, 7, 11, 15, 19]
    assert [e.step for e in events(out, "kd").Scalars("val/acc")] == [10, 21]


def test_hparams_lists_settings_and_what_they_led_to(out: Path) -> None:
    import json

    results = json.loads((out / "results.json").read_text())
    for run in RUNS:
        found = events(out, run)
        plugin = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        start = HParamsPluginData.FromString(plugin).session_start_info.hparams
        options = {k: v.string_value or v.number_value for k, v in start.items()}
        assert options["net"] == "LightNN"
        if run == "kd":
            shown = "temperature=4, kd_weight=0.25, ce_weight=0.75, standardize=False, teacher_entropy=False"
            assert options["objective"] == f"Hinton({shown})"
            assert options["temperature"] == 4
            assert options["kd_weight"] == 0.25
        assert "_hparams_/session_end_info" in found.summary_metadata
        facts = results["teacher"] if run == "teacher" else results["students"][run]
        assert found.Scalars("test/acc")[-1].value == pytest.approx(facts["test_acc"][0], abs=1e-6)
        assert found.Scalars("cost/parameters")[-1].value == facts["parameters"]
        assert found.Scalars("cost/train_flops")[-1].value == pytest.approx(facts["train_flops"], rel=1e-6)


def test_a_run_that_goes_on_within_the_second_is_read_in_order(tmp_path: Path) -> None:
    root, run = tmp_path / "seed0", "ce"
    for resumed_at in (0, 2):
        for file in (root / run).glob("*"):
            file.rename(str(file).replace(f".{os.getpid()}.", ".killed."))  # which sorts after any process
        logger = RunsLogger(root, [run], run, resumed_at)
        for step in range(resumed_at, 4):
            logger.log_metrics({f"{run}/train/loss": 1.0}, step)
        logger.finalize("success")
    assert [event.step for event in events(tmp_path, run).Scalars("train/loss")] == [0, 1, 2, 3]


def test_the_terms_add_up_to_the_loss(out: Path) -> None:
    found = events(out, "kd")
    for loss, kd_term, ce in zip(*(found.Scalars(f"train/{tag}") for tag in ("loss", "kd", "ce")), strict=True):
        assert loss.value == pytest.approx(0.25 * kd_term.value + 0.75 * ce.value, rel=1e-5)
