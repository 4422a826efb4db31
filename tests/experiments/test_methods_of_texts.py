"""Methods of texts by the command: all that fit side by side, and with the best of several settings."""

import json
from pathlib import Path

import pytest

from experiments import kd
from tests.chats import rows, write_lines
from tests.commands import results
from tests.lit_modules.text.test_on_policy import NETS


def flags(folder: Path, *more: str) -> list[str]:
    path = write_lines(folder / "chat.jsonl", rows(40, 4))
    return [
        "--data", "Chat", "--data.path", str(path), "--data.batch_size", "8", "--data.validation_size", "4",
        "--data.test_size", "4", *NETS, "--seeds", "1", "--trainer.max_epochs", "1", "--out", str(folder / "run"),
        *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_zoo_of_texts_has_the_methods_that_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kd.main(flags(tmp_path, "--zoo", "true"))
    students = results(tmp_path / "run")["students"]
    classes = {entry["objective"] for entry in students.values()}
    assert {"HiddenStates", "AttentionScores", "MiniLM", "SequenceLevel", "GKD", "SkewKL", "TotalVariation"} <= classes
    assert all(entry["test_loss"][0] > 0 for entry in students.values())
    assert "without hint: " in capsys.readouterr().out


@pytest.mark.slow
def test_settings_of_methods_of_texts_are_searched(tmp_path: Path) -> None:
    names = ["ce", "hiddenstates", "attentionscores", "minilm", "sequencelevel"]
    kd.main(flags(tmp_path, "--tune", "2", "--tune_seeds", "1", "--only", *names))
    found = results(tmp_path / "run")
    assert {*names} <= {*found["students"]}
    assert "minilm" in json.dumps(found["tuning"])
