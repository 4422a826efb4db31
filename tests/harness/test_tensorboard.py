"""What TensorBoard shows is what was trained: curves, columns and their order, charts, readable pictures."""

import json
import math
import os
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from experiments import gpt, kd
from harness.runs.tensorboard import BANDS, RunsLogger, confusion_figure
from tests.commands import run_of
from tests.grids import mostly_slow
from tests.training import assert_same

STUDENTS = ("ce", "kd")
NETS = ("teacher", *STUDENTS)
QUICK = [
    "--data", "Digits",
    "--teacher", "LightNN", "--only", *STUDENTS, "--trainer.max_epochs", "2", "--trainer.log_every_n_steps", "2",
    "--data.train_size", "300", "--variants.kd.temperature", "4",
]  # fmt: skip


out = run_of(kd, *QUICK, "--seeds", "2")


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    found.Reload()
    return found


def hparams(folder: Path, tag: str) -> Any:
    content = events(folder).summary_metadata[f"_hparams_/{tag}"].plugin_data.content
    return getattr(HParamsPluginData.FromString(content), tag)


def charts(folder: Path) -> dict[str, list[str]]:
    (event,) = events(folder).Tensors("custom_scalars__config__")
    layout = Layout.FromString(event.tensor_proto.string_val[0])
    return {category.title: [chart.title for chart in category.chart] for category in layout.category}


def shown(folder: Path) -> list[str]:
    """The columns of the HPARAMS tab that TensorBoard 2.21 ticks: five settings, then five metrics."""
    experiment = hparams(folder, "experiment")
    ordered = sorted(experiment.hparam_infos, key=lambda info: (not info.differs, info.name))
    return [info.name for info in ordered[:5]] + [info.name.tag for info in experiment.metric_infos[:5]]


def test_charts_survive_a_stop_before_the_first_value(tmp_path: Path) -> None:
    for step, values in {0: {"train/lr-Adam": 0.1}, 3: {"ce/val/acc": 0.5}, 5: {"ce/val/acc": 0.6}}.items():
        logger = RunsLogger(tmp_path, ["ce"], "students", purge_step=step)
        logger.log_metrics(values, step + 1)
        logger.finalize("stopped")
    assert charts(tmp_path / "ce") == charts(tmp_path / "students")
    assert [event.step for event in events(tmp_path / "ce").Scalars("val/acc")] == [4, 6]


def test_the_same_tags_for_teacher_and_students(out: Path) -> None:
    common = {"train/loss", "train/acc", "train/loss_epoch", "train/acc_epoch", "val/loss", "val/acc", "test/loss"}
    common |= {
        "test/acc",
        "test/correct",
        "training_cost/parameters",
        "training_cost/train_flops",
        "training_cost/step_ms",
    }
    common |= {f"test_class_acc/{i}" for i in range(10)}
    runs = {name: events(out / "seed0" / name) for name in NETS}
    for name, run in runs.items():
        assert common <= {*run.Tags()["scalars"]}, name
        assert run.Tags()["images"] == ["test/confusion"]
    kd_run = runs["kd"]
    assert [event.step for event in kd_run.Scalars("train/loss")] == [1, 3, 5]
    assert [event.step for event in kd_run.Scalars("val/acc")] == [2, 5]
    for loss, kd_term, ce in zip(*(kd_run.Scalars(f"train/{tag}") for tag in ("loss", "kd", "ce")), strict=True):
        assert loss.value == pytest.approx(0.25 * kd_term.value + 0.75 * ce.value, rel=1e-5)


def test_the_score_comes_first_then_what_differs_and_the_cost_last(out: Path) -> None:
    results = json.loads((out / "results.json").read_text())
    for name in NETS:
        folder = out / "seed1" / name
        costs = ["training_cost/parameters", "training_cost/step_ms", "training_cost/train_flops"]
        assert shown(folder) == ["acc", "net", "objective", "seed", "training", "test/loss", *costs]
        row = hparams(folder, "session_start_info").hparams
        facts = results["teacher"] if name == "teacher" else results["students"][name]
        assert row["acc"].number_value == facts["test_acc"][1]
        assert (row["seed"].string_value, row["net"].string_value) == ("1", "LightNN")
        assert row["training"].string_value == (
            "Adam(lr=0.001), Digits(batch_size=128, train_size=300), 2 epochs, auto, devices auto, 32-true"
        )
        assert (row["lr"].number_value, row["epochs"].number_value, row["batch_size"].number_value) == (0.001, 2, 128)
        run = events(folder)
        assert "_hparams_/session_end_info" in run.summary_metadata
        told = {"test/acc": facts["test_acc"][1]} | {
            f"training_cost/{key}": facts[key] for key in ("parameters", "train_flops")
        }
        assert {tag: run.Scalars(tag)[-1].value for tag in told} == pytest.approx(told, rel=1e-6)
    options = "temperature=4, kd_weight=0.25, ce_weight=0.75, standardize=False, teacher_entropy=False"
    assert row["objective"].string_value == f"Hinton({options})"
    assert (row["temperature"].number_value, row["kd_weight"].number_value) == (4, 0.25)


def test_the_first_charts_are_of_the_validation_and_costs_are_behind_all_curves_of_training(out: Path) -> None:
    tags = {name: {*events(out / "seed0" / name).Tags()["scalars"]} for name in NETS}
    groups = sorted({tag.split("/")[0] for of_net in tags.values() for tag in of_net})  # as TIME SERIES has them
    assert groups == ["compare", "test", "test_class_acc", "train", "training_cost", "val"]
    for name in NETS:
        run = events(out / "seed0" / name)
        assert {tag for tag in tags[name] if tag.startswith("compare/")} == {"compare/val/acc", "compare/val/loss"}
        for tag in ("val/acc", "val/loss"):
            first, second = ([(e.step, e.value) for e in run.Scalars(shown)] for shown in (tag, f"compare/{tag}"))
            assert first == second
    assert "compare/val/acc" in events(out / "mean" / "kd").Tags()["scalars"]


def test_a_run_that_goes_on_within_the_second_is_read_in_order(tmp_path: Path) -> None:
    for resumed_at in (0, 2):
        for file in (tmp_path / "ce").glob("*"):
            file.rename(str(file).replace(f".{os.getpid()}.", ".killed."))  # which sorts after any process
        logger = RunsLogger(tmp_path, ["ce"], "ce", resumed_at)
        for step in range(resumed_at, 4):
            logger.log_metrics({"ce/train/loss": 1.0}, step)
        logger.finalize("success")
    assert [event.step for event in events(tmp_path / "ce").Scalars("train/loss")] == [0, 1, 2, 3]


def test_all_rows_have_the_columns_of_all_objectives(out: Path) -> None:
    teacher, student = (hparams(out / "seed0" / name, "experiment").hparam_infos for name in ("teacher", "kd"))
    columns = {info.name for info in teacher}
    assert columns == {info.name for info in student}
    assert {"temperature", "kd_weight", "hint_weight", "strategy", "precision", "exact", "optimizer"} <= columns
    assert not any(info.HasField("domain_discrete") for info in student)  # which would hide rows of other experiments


def test_a_chart_shows_all_runs(out: Path) -> None:
    training = ["learning rate", "gradient norm, before clipping", "samples a second", "peak memory, MiB"]
    scores = ["validation accuracy", "validation loss", "training loss"]
    assert charts(out / "seed0" / "students") == {"scores": scores, "training": training}
    assert charts(out / "seed0" / "teacher") == charts(out / "seed0" / "students")
    assert charts(out / "mean" / "kd") == {"means over seeds": [f"{title}, mean and range" for title in scores]}


def test_what_students_share_is_a_run_of_its_own(out: Path) -> None:
    shared = {"train/samples_per_sec", "train/peak_memory_mib"}
    assert set(events(out / "seed0" / "students").Tags()["scalars"]) == shared
    own = set(events(out / "seed0" / "kd").Tags()["scalars"])
    assert {"train/lr-Adam", "train/grad_2.0_norm_total"} <= own
    assert not shared & own
    assert shared | {"train/lr-Adam"} <= set(events(out / "seed0" / "teacher").Tags()["scalars"])
    rates = events(out / "seed0" / "kd").Scalars("train/lr-Adam")
    assert [(event.step, event.value) for event in rates] == [(step, pytest.approx(0.001)) for step in (1, 3, 5)]


def test_a_method_is_the_mean_of_its_seeds_with_their_range(out: Path) -> None:
    for name in NETS:
        method, seeds = events(out / "mean" / name), [events(out / f"seed{seed}" / name) for seed in (0, 1)]
        tags = {tag for tag in seeds[0].Tags()["scalars"] if not tag.startswith("test_class_acc")}
        bands = {band for tag in ("train/loss", "val/loss", "val/acc") for band in BANDS[tag]}
        assert set(method.Tags()["scalars"]) == tags | bands
        for tag in tags:
            columns = [*zip(*([event.value for event in run.Scalars(tag)] for run in seeds), strict=True)]
            assert [event.step for event in method.Scalars(tag)] == [event.step for event in seeds[0].Scalars(tag)]
            for band, of in zip((tag, *BANDS.get(tag, ())), (mean, mean, min, max), strict=False):
                assert [event.value for event in method.Scalars(band)] == pytest.approx([*map(of, columns)])


def test_methods_are_the_first_runs_that_get_a_colour(out: Path) -> None:
    first = {run: events(out / run).Tensors("custom_scalars__config__")[0].wall_time for run in ("mean/ce", "mean/kd")}
    assert max(first.values()) < events(out / "seed0" / "teacher").FirstEventTimestamp()  # also where a step takes long


def test_one_seed_has_no_mean_and_no_logger_writes_nothing(tmp_path: Path) -> None:
    for name, flags in {"one": ["--seeds", "1"], "none": ["--seeds", "2", "--trainer.logger", "false"]}.items():
        kd.main([*QUICK, *flags, "--trainer.max_epochs", "1", "--out", str(tmp_path / name)])
    assert not (tmp_path / "one" / "mean").exists()
    assert not [*(tmp_path / "none").rglob("events*"), *(tmp_path / "none").rglob("mean")]
    one, none = (torch.load(tmp_path / run / "seed0" / "kd" / "weights.pt") for run in ("one", "none"))
    assert_same(one, none)


def test_a_language_models_row_begins_with_its_bits(tmp_path: Path) -> None:
    small = ["--net.num_layers", "1", "--net.embed_dim", "8", "--net.num_heads", "1", "--data.block_size", "8"]
    steps = ["--trainer.max_steps", "4", "--trainer.val_check_interval", "2", "--trainer.log_every_n_steps", "1"]
    gpt.main([*small, *steps, "--seeds", "2", "--out", str(tmp_path / "run")])
    folder = tmp_path / "run" / "seed0" / "gpt"
    assert shown(folder)[:5] == ["bpc", "net", "objective", "seed", "training"]
    row = hparams(folder, "session_start_info").hparams
    assert row["net"].string_value.startswith("GPT(")
    assert "num_layers=1" in row["net"].string_value
    assert row["training"].string_value.startswith("LitLanguageModel(lr=0.003), Text(")
    assert charts(folder)["scores"] == ["validation, bits a character", "validation loss", "training loss"]
    rates = [event.value for event in events(folder).Scalars("train/lr-AdamW")]
    assert rates == pytest.approx([0.003 * (step + 1) / 101 for step in range(4)])
    assert "seeds/val/bpc_mean" in events(tmp_path / "run" / "mean" / "gpt").Tags()["scalars"]


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("classes", "least", "most"),
    mostly_slow([(2, 350, 350), (10, 350, 350), (100, 1200, 1300), (1000, 1, 1600)], (10, 350, 350)),
)
def test_ten_classes_fill_the_width_at_which_pictures_are_shown(classes: int, least: int, most: int) -> None:
    figure = confusion_figure(torch.eye(classes, dtype=torch.int64) * 1000, [f"class {i}" for i in range(classes)])
    width, height = figure.get_size_inches() * figure.dpi
    assert width == height
    assert least <= round(width) <= most
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == (["1000"] * classes if classes <= 25 else [])
    figure.draw_without_rendering()
    if classes == 10:
        boxes = [text.get_window_extent() for text in figure.axes[0].texts]
        (x, y), (x0, y0) = figure.axes[0].transData.transform([(1, 1), (0, 0)])
        cell = math.hypot(x - x0, y - y0) / 2**0.5
        assert all(box.width < 1.1 * cell for box in boxes)
        assert all(box.height > 7 for box in boxes)


@pytest.mark.drawn
def test_classes_whose_names_no_font_has_are_numbered_and_it_says_so() -> None:
    figure = confusion_figure(torch.eye(2, dtype=torch.int64), ["\U00013000", "b"])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["0", "1"]
    assert figure.axes[0].get_title() == "classes by number: no font on this machine has their names"
    figure = confusion_figure(torch.eye(2, dtype=torch.int64), ["\u20dd", "b"])  # STIX has it, Matplotlib's own has not
    label = figure.axes[0].get_xticklabels()[0]
    assert (label.get_text(), label.get_fontfamily()[0], len(label.get_fontfamily())) == ("\u20dd", "DejaVu Sans", 2)
    assert figure.axes[0].get_title() == ""
