"""`--teacher_top_k`: the first run stores its teacher, later ones don't load it and print the same table."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import kd
from harness.runs.nets import load_net
from lit_modules.training.tensor_folder import TensorFolder
from tests.commands import bad_input, kill_at, results, start
from tests.language import written

STUDENT = ["--student", "GPT", "--student.num_layers", "1", "--student.num_heads", "1", "--student.embed_dim", "8"]
TEACHER = ["--teacher", "GPT", "--teacher.num_layers", "1", "--teacher.num_heads", "2", "--teacher.embed_dim", "8"]
STORED = ["--teacher_top_k", "5", "--teacher_cache_dir"]


def flags(folder: Path, *more: str) -> list[str]:
    data = ["--data", "Text", "--data.path", str(written(folder)), "--data.block_size", "8", "--data.batch_size", "13"]
    methods = ["--variants.reverse", "ReverseKL", "--variants.warm.class_path", "Hinton", "--variants.warm.temperature"]
    methods += ["3", "--only", "kd", "reverse", "warm"]
    fit = ["--trainer.max_epochs", "2", "--seeds", "1", "--data.same_blocks", "true"]
    return [*data, *TEACHER, *STUDENT, *methods, *fit, *more]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of runs with a teacher that another has trained."""
    folder = tmp_path_factory.mktemp("teacher")
    kd.main([*flags(folder), "--only", "ce", "--out", str(folder / "run")])
    return [*flags(folder), "--teacher_ckpt", str(folder / "run" / "seed0" / "teacher" / "weights.pt")]


def table(out: Path) -> Any:
    found = results(out)
    rows = {"teacher": found["teacher"], **found["students"]}
    return {name: {key: row[key] for key in ("parameters", "test_loss", "test_bpc")} for name, row in rows.items()}


def test_a_later_run_does_not_load_the_teacher(loaded: list[str], tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    stored = [*STORED, str(tmp_path / "kept")]
    kd.main([*loaded, *stored, "--out", str(tmp_path / "first")])
    (folder,) = (tmp_path / "kept").iterdir()
    assert len([*folder.glob("test-*.json")]) == 1
    capfd.readouterr()
    monkeypatch.setattr(kd, "load_teacher", pytest.fail)
    kd.main([*loaded, *stored, "--out", str(tmp_path / "second")])
    assert "teacher's outputs read from" in capfd.readouterr().out
    assert table(tmp_path / "second") == table(tmp_path / "first")
    # It goes on and grows as any other.
    kd.main(["--out", str(tmp_path / "second"), "--resume", "true", "--seeds", "2"])
    grown = results(tmp_path / "second")["students"]["kd"]["test_loss"]
    assert len(grown) == 2
    assert grown[0] == results(tmp_path / "first")["students"]["kd"]["test_loss"][0]
    line = "expected a net with weights; the run read this teacher's outputs, and did not load it"
    assert line in bad_input(load_net, tmp_path / "second" / "seed0" / "teacher")
    # A student of another temperature needs the teacher itself.
    monkeypatch.undo()
    hot = ["--variants.hot.class_path", "Hinton", "--variants.hot.temperature", "5"]
    only = ["--only", "kd", "reverse", "warm", "hot"]
    kd.main(["--out", str(tmp_path / "second"), "--resume", "true", *hot, *only])
    assert len(results(tmp_path / "second")["students"]["hot"]["test_loss"]) == 2


def test_seeds_that_are_added_have_the_figures_of_a_run_of_all(loaded: list[str], tmp_path: Path) -> None:
    one, two = ([*STORED, str(tmp_path / name)] for name in ("one", "two"))
    kd.main([*loaded, *one, "--out", str(tmp_path / "grown")])
    kd.main(["--out", str(tmp_path / "grown"), "--resume", "true", "--seeds", "2"])
    kd.main([*loaded, *two, "--seeds", "2", "--out", str(tmp_path / "whole")])
    grown, whole = (results(tmp_path / name)["students"]["kd"] for name in ("grown", "whole"))
    assert grown["test_agreement"] == whole["test_agreement"]
    assert None not in grown["test_agreement"]


def test_averages_of_a_teachers_weights_have_a_file_of_their_own(loaded: list[str], tmp_path: Path) -> None:
    weights = torch.load(loaded[-1])
    both = {"state_dict": weights, "state_dict_ema": {name: x / 2 for name, x in weights.items()}}
    torch.save(both, tmp_path / "both.pt")
    flags = [*loaded[:-1], str(tmp_path / "both.pt"), "--only", "kd", *STORED, str(tmp_path / "kept")]
    losses = []
    for averaged in ("false", "true"):
        kd.main([*flags, "--teacher_ckpt_ema", averaged, "--out", str(tmp_path / averaged)])
        losses.append(results(tmp_path / averaged)["teacher"]["test_loss"])
    assert losses[0] != losses[1]
    assert len([*(tmp_path / "kept").iterdir()]) == 2


def test_settings_that_cannot_be_stored_are_refused(loaded: list[str], tmp_path: Path, refusal: Any) -> None:
    kept = ["--teacher_cache_dir", str(tmp_path / "kept")]
    refused = {
        ("--teacher_top_k", "5"): "--teacher_top_k 5: expected --teacher_cache_dir DIR beside it",
        ("--teacher_top_k", "0", *kept): "--teacher_top_k 0: expected a number of tokens",
        ("--teacher_tail", "sample"): "--teacher_tail sample: expected --teacher_top_k N beside it",
        ("--teacher_top_k", "all", "--teacher_tail", "sample", *kept): "leaves no tail",
        ("--teacher_top_k", "5", *kept, "--data.same_blocks", "false"): "same in each epoch; --data.same_blocks true",
        ("--teacher_top_k", "5", *kept, "--teacher_tail", "sample"): "for this method, which can't learn from 5 tokens",
        ("--teacher_top_k", "5", *kept, "--tune", "2"): "all, or no --tune",
        ("--teacher_top_k", "5", *kept, "--variants.cosine", "Cosine", "--only", "cosine"): "which is not stored",
    }
    for more, line in refused.items():
        assert line in refusal(kd.main, *loaded, *more), more
    digits = ["--data", "Digits", "--teacher_top_k", "5", *kept]
    assert "--teacher_top_k 5: expected texts, not --data Digits" in refusal(kd.main, *digits)


def test_a_damaged_file_is_refused_before_anything_is_written(loaded: list[str], tmp_path: Path, refusal: Any) -> None:
    stored = [*STORED, str(tmp_path / "kept")]
    kd.main([*loaded, *stored, "--out", str(tmp_path / "first")])
    (path,) = (tmp_path / "kept").glob("*/13.safetensors")
    whole = path.read_bytes()
    path.write_bytes(whole[:-20] + b"?" + whole[-19:])
    assert "a file whose tensors have its checksum; it is damaged: delete it" in refusal(kd.main, *loaded, *stored)
    path.write_bytes(whole[:-20])
    assert f"--teacher_cache_dir {path}: expected a whole file of tensors" in refusal(kd.main, *loaded, *stored)
    shutil.rmtree(path.parent)
    shutil.rmtree(tmp_path / "first")
    kd.main([*loaded, *stored, "--out", str(tmp_path / "first")])
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_a_killed_run_goes_on_and_several_processes_write_the_same(loaded: list[str], tmp_path: Path) -> None:
    one, two = ([*STORED, str(tmp_path / name)] for name in ("one", "two"))
    exact = [*loaded, "--exact", "4"]
    start(tmp_path / "whole", *exact, *one).check()
    killed = kill_at(TensorFolder, "write", 2, after=True)
    start(tmp_path / "cut", *exact, *two, before=killed).check(-signal.SIGKILL)
    (folder,) = (tmp_path / "two").iterdir()
    assert {path.name for path in folder.iterdir()} == {".lock", "0.safetensors", "13.safetensors"}
    start(tmp_path / "cut", "--resume", "true", "--trainer.devices", "2").check()
    files = [*(tmp_path / "one").glob("*/*.safetensors")]
    assert len(files) > 2
    assert all((folder / path.name).read_bytes() == path.read_bytes() for path in files)
    assert table(tmp_path / "cut") == table(tmp_path / "whole")
