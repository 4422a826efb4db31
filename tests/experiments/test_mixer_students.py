"""kd.py with students whose attention is another one than their teacher's: recorded, on ranks, resumed, reported."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from experiments import gpt, kd
from harness.runs.nets import load_net, read_spec
from harness.studies.text import mixer_parts
from tests.commands import results
from tests.training import assert_same

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60


def _flags(folder: Path, *more: str) -> list[str]:
    (folder / "a.txt").write_text(TEXT)
    return [
        "--data", "Text", "--data.path", str(folder / "a.txt"), "--data.block_size", "8", "--data.batch_size", "6",
        "--teacher", "GPT", "--teacher.num_layers", "3", "--teacher.num_heads", "2", "--teacher.embed_dim", "8",
        "--teacher.position", "rotary", "--student", "Mixer", "--student.window", "3", "--student.softmax_layers", "1",
        "--variants.align", "Linearize", "--only", "kd", "align", "--seeds", "1", "--trainer.max_epochs", "2",
        "--trainer.limit_train_batches", "4", *more,
    ]  # fmt: skip


def test_students_begin_with_the_teachers_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a step they have them, and the table has the loss of each part of their attention alone."""
    kd.main(_flags(tmp_path, "--optimizer.lr", "1e-30", "--out", str(tmp_path / "run")))
    printed, seed = capsys.readouterr().out, tmp_path / "run" / "seed0"
    plan = yaml.safe_load((seed / "student.mixer.yaml").read_text())
    (softmax,) = plan["softmax_layers"]
    assert plan["divergences"][softmax] == max(plan["divergences"])
    assert f"student: Mixer softmax in blocks {softmax}; KL to the teacher with one block replaced: " in printed
    teacher, student = (load_net(seed / name).state_dict() for name in ("teacher", "align"))
    for key, value in teacher.items():  # biases of zero have moved by the rate
        torch.testing.assert_close(student[key], value, rtol=0, atol=1e-20)
    spec = read_spec(seed / "align")
    assert spec["class_path"].endswith(".GPT")
    assert spec["init_args"]["softmax_layers"] == [softmax]
    rows = results(tmp_path / "run")["students"]
    for name in ("kd", "align"):
        parts = {part: rows[name][f"test_loss_{part}"][0] for part in ("window", "linear")}
        assert parts["window"] != parts["linear"]
        assert rows[name]["test_loss"][0] not in parts.values()
    assert "window alone" in (tmp_path / "run" / "results.md").read_text()
    first, second = (
        {name for name in epoch if name.startswith("train/")} for epoch in _record(tmp_path / "run")["epochs"]
    )
    assert first - second == {"train/mixers"}
    assert second - first == {"train/kd", "train/ce"}


def _record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "seed0" / "students.json").read_text())["nets"]["align"]
    return record


def test_the_loss_of_both_parts_is_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixer_parts, "ALONE", ("both",))
    limit = ["--trainer.limit_test_batches", "2", "--only", "align"]
    kd.main(_flags(tmp_path, *limit, "--out", str(tmp_path / "run")))
    figures = _record(tmp_path / "run")
    assert figures["test_loss_both"] == pytest.approx(figures["test_loss"], rel=1e-5)


def check_processes_and_a_resume(folder: Path, flags: Sequence[str], arm: str, plan: str) -> None:
    """One process, two and a resume give an arm the same weights, and its net the same plan in a file."""

    def weights(run: str) -> dict[str, torch.Tensor]:
        return load_net(folder / run / "seed0" / arm).state_dict()

    exact = [*flags, "--exact", "2"]
    kd.main([*exact, "--out", str(folder / "one")])
    kd.main([*exact, "--trainer.devices", "2", "--out", str(folder / "two")])
    assert_same(weights("two"), weights("one"))
    one, two = (yaml.safe_load((folder / run / "seed0" / plan).read_text()) for run in ("one", "two"))
    assert one == two
    for name in ("students.json", "students.ckpt", plan):
        (folder / "two" / "seed0" / name).unlink()
    kd.main(["--out", str(folder / "two"), "--resume", "true", "--trainer.devices", "1"])
    assert_same(weights("two"), weights("one"))


@pytest.mark.slow
def test_processes_and_a_resume_change_nothing(tmp_path: Path) -> None:
    check_processes_and_a_resume(tmp_path, _flags(tmp_path), "align", "student.mixer.yaml")


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--student.softmax_layers", "3"], "--student.softmax_layers 3: expected 0 to 2 of the 3 blocks"),
        (["--student.mixer", "linear"], "--student.window 3: expected null, or mixer=windowed; linear has none"),
        (["--teacher.window", "4"], "--student.mixer windowed: expected linear, gated or delta for a teacher that"),
        (
            ["--student", "GPT", "--student.softmax_layers", "null"],
            "variants.align.student GPT: expected --student Mixer, which is made of the teacher",
        ),
        (["--variants.align.maps_until", "0.9"], "--variants.align.maps_until 0.9: expected at most mixers_until, 0.5"),
        (
            ["--trainer.strategy", "pipeline", "--trainer.devices", "2", "--teacher.tie_weights", "false"],
            "variants.align Linearize: expected an objective without trained parts for the teacher's outputs",
        ),
    ],
)
def test_wrong_options(more: list[str], line: str, tmp_path: Path, refusal: Any) -> None:
    assert line in refusal(kd.main, *_flags(tmp_path, *more))


def test_a_net_by_itself_is_not_made_of_a_teacher(refusal: Any) -> None:
    assert "--net Mixer: expected a net by itself; Mixer is a student" in refusal(gpt.main, "--net", "Mixer")
