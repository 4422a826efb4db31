"""Which test samples were right: kept for each net and seed, the same from any number of processes."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.reports import samples
from harness.reports.combine import combine_student
from harness.reports.results import Results
from harness.reports.uncertainty import crossed_interval
from harness.runs.records import Failure, NetRecord
from lit_modules.tasks import ACCURACY, BITS
from tests import bake_off_facts
from tests.commands import results, start
from tests.figures import drawn

MEANS = ("test_ece", "test_kl", "test_agreement")
KEPT = ("test_right", "test_predicted", *MEANS)
SMALL = [
    "--data", "Digits",
    "--data.train_size", "150", "--data.test_size", "101", "--data.batch_size", "60", "--only", "ce", "kd",
    "--teacher", "LightNN", "--trainer.max_epochs", "1", "--seeds", "2",
]  # fmt: skip
TEXT = [
    "--data", "Text", "--data.block_size", "16", "--teacher", "GPT", "--student", "GPT", "--only", "ce", "kd",
    *(f"--{net}.{name}={size}" for net in ("teacher", "student") for name, size in
      {"num_layers": 1, "num_heads": 1, "embed_dim": 8}.items()),
    "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "2", "--seeds", "2",
]  # fmt: skip


def study(out: Path, *flags: str) -> Any:
    start(out, *flags).check()
    assert not list(out.rglob("*.samples"))
    return results(out)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one") / "run"
    with drawn():
        study(out, *SMALL)
    return out


def test_their_sum_is_what_was_counted(one: Path) -> None:
    found = results(one)
    for entry in (found["teacher"], *found["students"].values()):
        right = [samples.unpack(stored, 101) for stored in entry["test_right"]]
        predicted = [samples.unpack_classes(stored) for stored in entry["test_predicted"]]
        labels = samples.labels(Results.read(found))
        assert [(each != 0).tolist() for each in right] == [(each == labels).tolist() for each in predicted]
        assert [int(each.sum()) for each in right] == entry["test_correct"]


def test_intervals_over_samples_are_on_the_page(one: Path) -> None:
    found = results(one)
    right = (found["students"][name]["test_right"] for name in ("ce", "kd"))
    ce, kd = (np.stack([samples.unpack(stored, 101) for stored in seeds]) for seeds in right)
    interval = crossed_interval(kd - ce)
    assert interval["mean"] == pytest.approx(found["students"]["kd"]["delta_vs_ce"]["mean"])
    assert ACCURACY.difference(interval) in (one / "results.md").read_text()


def test_a_run_has_its_report(one: Path) -> None:
    page = (one / "report.html").read_text("utf-8")
    for said in (
        "Curves",
        "Fidelity and calibration",
        "most confused test samples",
        "kd.py --data Digits --data.train_size 150",
    ):
        assert said in page
    assert page.count('src="data:image/png') == 4  # a matrix for each net, the most confused images


@pytest.mark.slow
def test_several_processes_keep_the_same_samples(one: Path, tmp_path: Path) -> None:
    exact = study(tmp_path / "exact", *SMALL, "--exact", "3", "--seeds", "1")
    for name, devices in (("plain", "2"), ("plain", "3"), ("exact", "2"), ("exact", "3")):
        flags = ["--exact", "3"] if name == "exact" else []
        many = study(tmp_path / f"{name}{devices}", *SMALL, *flags, "--seeds", "1", "--trainer.devices", devices)
        runs = [(exact if name == "exact" else results(one))["students"], many["students"]]
        for student in ("ce", "kd"):
            ours, other = ({key: run[student][key][:1] for key in KEPT if key in run[student]} for run in runs)
            assert set(ours) == {"test_right", "test_predicted", *MEANS}
            means = [{key: facts.pop(key) for key in MEANS} for facts in (ours, other)]
            assert ours == other
            if name == "exact":
                assert means[0] == means[1]
            for key in MEANS:
                assert means[0][key] == pytest.approx(means[1][key], abs=1e-6)


def test_texts_have_bits_of_each_sample(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    found = study(tmp_path / "run", *TEXT, "--data.path", str(tmp_path / "a.txt"))
    for entry in found["students"].values():
        for bits, whole in zip(entry["test_sample_bpc"], entry["test_bpc"], strict=True):
            assert len(bits) == -(-found["data"]["test"] // 16)  # texts, where the data counts tokens
            assert np.mean(bits) == pytest.approx(whole, rel=0.05)  # the last text is shorter


def test_values_come_back_as_they_were() -> None:
    right = np.array([1, 0, 1, 1, 0, 0, 0, 1, 1.0])
    assert np.array_equal(samples.unpack(samples.pack_bits(right != 0), 9), right)
    for largest, size in ((255, 1), (256, 2), (65_535, 2), (70_000, 4)):
        numbers = np.array([0, largest, 3])
        stored = samples.pack_classes(numbers)
        assert stored.startswith(f"u{size}:")
        assert len(base64.b64decode(stored[3:])) == 3 * size
        assert np.array_equal(samples.unpack_classes(stored), numbers)
    for stored, count in (("/w==", 9), ("////", 9)):
        with pytest.raises(ValueError, match=str(count)):
            samples.unpack(stored, count)


FIGURES = {"test_acc": 1.0, "test_correct": 1}


def test_seeds_that_failed_have_none() -> None:
    rows = [NetRecord("kd", FIGURES, samples={"test_right": "gA=="}), NetRecord("kd", {}, Failure(1, "ce"))]
    kd = combine_student(rows, ACCURACY)
    assert kd.samples == {"test_right": ["gA==", None]}
    ce = combine_student([NetRecord("ce", FIGURES, samples={"test_right": "AA=="})] * 2, ACCURACY)
    found = bake_off_facts.results()
    found.students, found.teacher.sampled = {"kd": kd, "ce": ce}, {"test_labels": samples.pack_classes(np.array([0]))}
    assert samples.difference_over_both(found, "kd", "ce")["mean"] == 1
    assert samples.difference_over_both(replace(found, metric=BITS), "kd", "ce") is None
    kd.samples = {"test_right": [None, None]}
    assert samples.difference_over_both(found, "kd", "ce") is None
