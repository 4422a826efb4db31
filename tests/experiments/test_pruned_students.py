"""kd.py with students made of the teacher's weights: recorded, the same on ranks and after a resume, wrong options."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import gpt, kd
from harness.runs.nets import load_net, read_spec
from tests.commands import results

TEXT = "the quick brown fox jumps over the lazy dog\n" * 60


def _flags(folder: Path, *more: str) -> list[str]:
    (folder / "a.txt").write_text(TEXT)
    return [
        "--data", "Text", "--data.path", str(folder / "a.txt"), "--data.block_size", "8", "--data.batch_size", "6",
        "--teacher", "GPT", "--teacher.num_layers", "4", "--teacher.num_heads", "2", "--teacher.embed_dim", "8",
        "--student", "Pruned", "--student.layers", "2", "--only", "ce", "kd", "--seeds", "1",
        "--trainer.max_epochs", "1", "--trainer.limit_train_batches", "4", *more,
    ]  # fmt: skip


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_net(folder / "seed0" / "kd").state_dict()


def test_students_begin_with_the_teachers_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kd.main(_flags(tmp_path, "--optimizer.lr", "1e-30", "--out", str(tmp_path / "run")))
    kept = json.loads((tmp_path / "run" / "seed0" / "student.pruned.json").read_text())
    assert len(kept["blocks"]) == 2
    assert "Pruned keeps blocks " in capsys.readouterr().out
    teacher = load_net(tmp_path / "run" / "seed0" / "teacher").state_dict()
    for name in ("ce", "kd"):
        student = load_net(tmp_path / "run" / "seed0" / name).state_dict()
        for place, block in enumerate(kept["blocks"]):
            key = "attention.qkv.weight"
            assert torch.equal(student[f"blocks.{place}.{key}"], teacher[f"blocks.{block}.{key}"])
    assert read_spec(tmp_path / "run" / "seed0" / "kd")["class_path"].endswith(".GPT")
    assert results(tmp_path / "run")["students"]["kd"]["test_bpc"][0] > 0


@pytest.mark.slow
def test_processes_and_a_resume_change_nothing(tmp_path: Path) -> None:
    exact = ["--exact", "2"]
    kd.main(_flags(tmp_path, *exact, "--out", str(tmp_path / "one")))
    kd.main(_flags(tmp_path, *exact, "--trainer.devices", "2", "--out", str(tmp_path / "two")))
    expected = _weights(tmp_path / "one")
    assert all(torch.equal(value, expected[key]) for key, value in _weights(tmp_path / "two").items())
    written = [json.loads((tmp_path / run / "seed0" / "student.pruned.json").read_text()) for run in ("one", "two")]
    assert written[0] == written[1]
    for name in ("students.json", "students.ckpt", "student.pruned.json"):
        (tmp_path / "two" / "seed0" / name).unlink()
    kd.main(["--out", str(tmp_path / "two"), "--resume", "true", "--trainer.devices", "1"])
    assert all(torch.equal(value, expected[key]) for key, value in _weights(tmp_path / "two").items())


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["--student.layers", "5"], "--student.layers 5: expected 1 to 4 blocks, which the teacher has"),
        (["--student.heads", "1"], "--student.heads 1: expected it left out: of GPT whole blocks are kept or left out"),
    ],
)
def test_wrong_options(more: list[str], line: str, tmp_path: Path, refusal: Any) -> None:
    assert line in refusal(kd.main, *_flags(tmp_path, *more))


def test_a_net_by_itself_is_not_pruned(tmp_path: Path, refusal: Any) -> None:
    by_itself = ["--data", "Text", "--student", "GPT", "--teacher", "Pruned", "--teacher.layers", "1", "--only", "kd"]
    assert "--teacher Pruned: expected a net by itself" in refusal(kd.main, *by_itself)
    assert "--net Pruned: expected a net by itself" in refusal(gpt.main, "--net", "Pruned", "--net.layers", "1")
