"""The last lines of a run name commands that work."""

import importlib
import shlex
from pathlib import Path

import pytest

from experiments import gpt, kd
from tests.deploy import exporting
from tests.deploy.test_predict import draw

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ["--seeds", "1", "--trainer.limit_train_batches", "2", "--trainer.limit_val_batches", "1"]
ONE_STEP = ["--trainer.max_steps", "1", "--trainer.val_check_interval", "1", "--data.block_size", "8"]


def steps(printed: str) -> dict[str, str]:
    """The lines from the report on, by their first word."""
    lines = printed.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("report "))
    return dict(line.split(maxsplit=1) for line in lines[first:])


def do(command: str, **words: Path | str) -> None:
    """Call an experiment's main as the command says, with words in place of those in capitals."""
    python, script, *flags = shlex.split(command)
    assert python == "python"
    main = importlib.import_module(f"experiments.{Path(script).stem}").main
    main([str(words.get(flag, flag)) for flag in flags])


@pytest.mark.extras
def test_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exporting.read_here(monkeypatch)
    draw(tmp_path / "images", ["a.png", "b.png"])
    flags = ["--data", "Digits", "--only", "ce", "kd", "--trainer.max_epochs", "1", *SHORT]
    kd.main([*flags, "--out", "a run"])
    named = steps(capsys.readouterr().out)
    assert [*named] == ["report", "curves", "compare", "predict", "export"]
    assert named["report"] == "'a run'/report.html, results.md, .png, .json"
    assert named["curves"] == "tensorboard --logdir 'a run'"
    kd.main([*flags, "--trainer.logger", "false", "--out", "other"])
    assert [*steps(capsys.readouterr().out)] == ["report", "compare", "predict", "export"]
    do(named["compare"], OTHER_RUN="other")
    do(named["predict"], FOLDER=tmp_path / "images")
    do(named["export"])
    assert Path("predictions.csv").read_text().count("\n") == 3
    assert Path("exported/use.py").is_file()


@pytest.mark.slow
@pytest.mark.extras
def test_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    exporting.read_here(monkeypatch)
    small = ["--net.num_layers", "1", "--net.embed_dim", "8", "--net.num_heads", "1"]
    gpt.main([*small, *SHORT, *ONE_STEP, "--trainer.limit_test_batches", "1", "--out", "run"])
    named = steps(capsys.readouterr().out)
    assert [*named] == ["report", "curves", "compare", "continue", "export"]
    do(named["continue"], PROMPT="To")
    assert capsys.readouterr().out.startswith("To")
    do(named["export"])
    assert Path("exported/model.onnx").is_file()
