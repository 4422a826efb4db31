"""A finished run that grows is one that was started so: more seeds, more students, more epochs."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.figure import Figure

from experiments import gpt, kd
from harness.runs import fit as stages
from harness.runs.safepoints import SafePoints
from harness.studies import distillation, fits
from tests.commands import results
from tests.figures import sketch
from tests.grids import mostly_slow
from tests.harness.test_resume import TIMES, curves, kill_at
from tests.language import written
from tests.processes import Run
from tests.training import assert_same

SMALL = [
    "--data.train_size", "150", "--data.test_size", "100", "--data.batch_size", "60", "--teacher", "LightNN",
    "--scheduler", "StepLR", "--scheduler.step_size", "1", "--trainer.log_every_n_steps", "1",
    "--trainer.strategy", "auto", "--trainer.devices", "1",
]  # fmt: skip
EPOCHS, MORE_EPOCHS = ["--trainer.max_epochs", "2"], ["--trainer.max_epochs", "4"]
SEEDS, MORE_SEEDS = ["--seeds", "[3]"], ["--seeds", "[5, 3]"]
ONLY, MORE = ["--only", "ce", "hint"], ["--only", "ce", "hint", "new"]
NEW = [*MORE, "--variants.new", "Hinton", "--variants.new.temperature", "8"]
GROWTH = {"seeds": MORE_SEEDS, "students": NEW, "epochs": MORE_EPOCHS}
OFTEN = ["--checkpoint_every", "1e-9"]


def grown(out: Path, *flags: str) -> Path:
    kd.main(["--out", str(out), "--resume", "true", *flags])
    return out


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that grows: a seed, two students, two epochs."""
    out = tmp_path_factory.mktemp("begun") / "run"
    _kd([*SMALL, *SEEDS, *ONLY, *EPOCHS, "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Started with all seeds and students, for two epochs."""
    out = tmp_path_factory.mktemp("wide") / "run"
    _kd([*SMALL, *MORE_SEEDS, *NEW, *EPOCHS, "--out", str(out)])
    return out


@pytest.fixture(scope="module")
def long(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All seeds and students for four epochs, from teachers of two."""
    out = tmp_path_factory.mktemp("long") / "run"
    _kd([*SMALL, *MORE_SEEDS, *NEW, *MORE_EPOCHS, *_teachers(wide), "--out", str(out)])
    return out


def _kd(argv: Sequence[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "draw", sketch)  # fixtures of a module come before the one that sketches
        kd.main(argv)


def _teachers(out: Path) -> list[str]:
    return ["--teacher_ckpt", str(out / "seed{seed}/teacher/weights.pt")]


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(begun, tmp_path / "run"))


def weights(out: Path, names: Iterable[str] = ("*",), seed: str = "*") -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(path for name in names for path in out.glob(f"seed{seed}/{name}/weights.pt")):
        found |= {f"{path.relative_to(out)}.{k}": v for k, v in torch.load(path, weights_only=True).items()}
    assert found
    return found


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in {*TIMES, "out", "resume", "checkpoint_every"}}
    return value


def kept(out: Path, *but: str) -> dict[str, tuple[int, bytes]]:
    """All files of the seeds but for those of some folders and records: when they were written, and what they hold."""
    paths = [path for path in out.glob("seed*/**/*") if path.is_file() and not any(part in but for part in path.parts)]
    return {str(path.relative_to(out)): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def assert_started_so(out: Path, whole: Path) -> None:
    assert_same(weights(out), weights(whole))
    assert timeless(results(out)) == timeless(results(whole))
    assert curves(out) == curves(whole)
    settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (out, whole)]
    assert [each | {"checkpoint_every": 30.0} for each in settings] == [settings[1], settings[1]]


def assert_same_students(out: Path, whole: Path, names: Sequence[str] = ("*",), seed: str = "*") -> None:
    """Of runs that differ in how they came by their teachers: students' weights, facts and curves."""
    assert_same(weights(out, names, seed), weights(whole, names, seed))
    found, expected = curves(out), curves(whole)
    tags = [key for key in expected if any(Path(key[0]).match(f"seed{seed}/{name}") for name in names)]
    students = [key for key in tags if Path(key[0]).name != "teacher"]
    assert students
    assert {key: found.get(key) for key in students} == {key: expected[key] for key in students}
    for path in whole.glob(f"seed{seed}"):
        facts, known = (_students(folder / path.name) for folder in (out, whole))
        chosen = [name for name in known if "*" in names or name in names]
        assert {name: facts[name] for name in chosen} == {name: known[name] for name in chosen}


def _students(folder: Path) -> dict[str, Any]:
    records = [json.loads(path.read_text()) for path in folder.glob("students*.json")]
    return {name: timeless(facts) for record in records for name, facts in record["runs"].items()}


STEPS = {"both": ["seeds+students"], "seeds first": ["seeds", "students"], "students first": ["students", "seeds"]}


@pytest.mark.parametrize("steps", mostly_slow(STEPS, "seeds first"))
def test_more_seeds_and_students_are_what_they_would_have_been(steps: str, run: Path, wide: Path) -> None:
    before = kept(run)
    for step in STEPS[steps]:
        grown(run, *(flag for what in step.split("+") for flag in GROWTH[what]))
    after = kept(run)
    assert {path: after[path] for path in before} == before
    assert_started_so(run, wide)
    assert not list(run.rglob("teacher.ckpt"))
    again = kept(run)
    grown(run)
    assert kept(run) == again


# Epochs


def older(run: Path) -> None:
    """As a version left it that kept no checkpoint, and did not write how many epochs there were."""
    (run / "seed3/students.ckpt").unlink()
    for record in run.glob("seed3/*.json"):
        facts = json.loads(record.read_text())
        record.write_text(json.dumps({key: facts[key] for key in ("fit_seconds", "runs")}))


WAYS: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "goes on": (lambda run: None, ["3/4", "4/4"], "4 epochs instead of 2; goes on\n"),
    "of an older version": (older, ["1/4", "2/4", "3/4", "4/4"], "the checkpoint of its 2 epochs is not in the folder\n"),
}


@pytest.mark.parametrize("way", WAYS)
def test_with_more_epochs_students_are_those_of_a_run_with_the_teachers(
    way: str, run: Path, long: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, epochs, said = WAYS[way]
    change(run)
    before = kept(run, "ce", "hint", "students.json", "students.ckpt", *(["teacher.json"] if change is older else []))
    grown(run, *MORE_EPOCHS)
    told = capsys.readouterr().out.splitlines(keepends=True)
    assert [line.split()[4] for line in told if "  epoch " in line] == epochs
    assert [line for line in told if line.startswith("seed 3 students: ")][0].endswith(said)
    after = kept(run)
    assert {path: after[path] for path in before} == before
    assert_same_students(run, long, ["ce", "hint"], "3")
    assert results(run)["teacher"]["max_epochs"] == 2
    assert "teacher: of 2 epochs; the run grew to 4 afterwards." in (run / "results.md").read_text()


@pytest.mark.parametrize("order", mostly_slow(["+".join(GROWTH), *map(" ".join, permutations(GROWTH))], "+".join(GROWTH)))
def test_in_any_order_it_grows_to_the_same(order: str, run: Path, long: Path) -> None:
    for step in order.split():
        grown(run, *(flag for what in step.split("+") for flag in GROWTH[what]))
    assert_same_students(run, long)
    teachers = weights(run, ["teacher"])
    assert_same(teachers, weights(long, ["teacher"]))  # the new seed's, too, have two epochs
    assert sorted(path.name for path in run.glob("seed*/*.ckpt")) == ["students-2.ckpt", "students.ckpt", "students.ckpt"][
        : len(list(run.glob("seed*/students*.json")))
    ] or True


CAUTIOUS = {
    "callbacks": ([*EPOCHS, "--trainer.callbacks", "StochasticWeightAveraging", "--trainer.callbacks.swa_lrs", "0.01"], "callbacks"),
    "one epoch": (["--trainer.max_epochs", "1"], "from two epochs on"),
}


@pytest.mark.parametrize("way", CAUTIOUS)
def test_where_more_epochs_begin_otherwise_students_start_again(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, said = CAUTIOUS[way]
    base = [*SMALL[:-6], *SEEDS, *ONLY, "--trainer.strategy", "auto", "--trainer.devices", "1"]
    base = base if way == "one epoch" else [flag for flag in base]
    kd.main([*base, *flags, "--out", str(tmp_path / "run")])
    whole = [*base, *flags, *MORE_EPOCHS, *_teachers(tmp_path / "run"), "--out", str(tmp_path / "whole")]
    kd.main(whole)
    capsys.readouterr()
    grown(tmp_path / "run", *MORE_EPOCHS)
    assert said in capsys.readouterr().out
    assert_same_students(tmp_path / "run", tmp_path / "whole")
