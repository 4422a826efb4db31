"""A finished run that grows is one that was started so: more seeds, more students, more epochs."""

import json
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from matplotlib.figure import Figure

from experiments import compare, gpt, kd
from harness.runs import records
from harness.runs.safepoints import SafePoints
from harness.runs.session import Session
from harness.studies import bakeoff, fits
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
    """All files of the seeds but for those of some folders and records: when they were written, and what they hold.

    Speed and memory of students that go on are written beside those of before.
    """
    paths = [path for path in out.glob("seed*/**/*") if path.is_file() and path.parent.name != "students"]
    paths = [path for path in paths if not any(part in but for part in path.parts)]
    return {str(path.relative_to(out)): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


def own_curves(out: Path) -> dict[tuple[str, str], list[tuple[int, Any]]]:
    """Those of nets: speed and memory belong to a fit, and a run that has grown has others."""
    return {key: points for key, points in curves(out).items() if not Path(key[0]).name.startswith("students")}


def assert_started_so(out: Path, whole: Path) -> None:
    assert_same(weights(out), weights(whole))
    assert timeless(results(out)) == timeless(results(whole))
    assert own_curves(out) == own_curves(whole)
    settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (out, whole)]
    assert [each | {"checkpoint_every": 30.0} for each in settings] == [settings[1], settings[1]]


def assert_same_students(out: Path, whole: Path, names: Sequence[str] = ("*",), seed: str = "*") -> None:
    """Of runs that differ in how they came by their teachers: students' weights, facts and curves."""
    assert_same(weights(out, names, seed), weights(whole, names, seed))
    found, expected = own_curves(out), own_curves(whole)
    tags = [key for key in expected if any(Path(key[0]).match(f"seed{seed}/{name}") for name in names)]
    students = [key for key in tags if Path(key[0]).name != "teacher"]
    assert students
    assert {key: found.get(key) for key in students} == {key: expected[key] for key in students}
    for path in whole.glob(f"seed{seed}"):
        facts, known = (_students(folder / path.name) for folder in (out, whole))
        chosen = [name for name in known if "*" in names or name in names]
        assert {name: facts[name] for name in chosen} == {name: known[name] for name in chosen}


def _students(folder: Path) -> dict[str, Any]:
    found = [json.loads(path.read_text()) for path in folder.glob("students*.json")]
    return {name: timeless(facts) for record in found for name, facts in record["nets"].items()}


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


@pytest.mark.parametrize("more", [[], MORE_SEEDS], ids=["resumed", "seeds"])
@pytest.mark.parametrize("lost", ["teacher/weights.pt", "ce/weights.pt", "hint/net.yaml"])
def test_a_net_that_is_missing_is_noticed(
    lost: str, more: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "seed3" / lost
    path.unlink()
    before = kept(run)
    with pytest.raises(SystemExit) as stop:
        grown(run, *more)
    assert stop.value.code == 2
    record = run / "seed3" / ("teacher.json" if "teacher" in lost else "students.json")
    expected = f"the nets of finished fits; without it, delete {record}, and they are trained again"
    assert capsys.readouterr().err == f"error: --out {path}: expected {expected}\n"
    assert kept(run) == before


def test_nets_that_are_missing_are_trained_again_to_the_same(run: Path, begun: Path) -> None:
    shutil.rmtree(run / "seed3/teacher")
    (run / "seed3/teacher.json").unlink()
    grown(run)
    assert_same(weights(run), weights(begun))
    assert timeless(results(run)) == timeless(results(begun))


# Epochs


def forget(run: Path) -> None:
    """Delete the checkpoint from which students go on."""
    (run / "seed3/students.ckpt").unlink()


WAYS: dict[str, tuple[Callable[[Path], None], list[int], str]] = {
    "goes on": (lambda run: None, [2, 3], "goes on"),
    "without a checkpoint": (
        forget,
        [0, 1, 2, 3],
        "starts again, as the folder has no checkpoint of it; the result is the same",
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_with_more_epochs_students_are_those_of_a_run_with_the_teachers(
    way: str, run: Path, long: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, epochs, said = WAYS[way]
    started, step = [], SafePoints.on_train_batch_start
    monkeypatch.setattr(
        SafePoints, "on_train_batch_start", lambda *args: (started.append(args[1].current_epoch), step(*args))
    )
    change(run)
    before = kept(run, "ce", "hint", "students.json", "students.ckpt")
    grown(run, *MORE_EPOCHS)
    assert list(dict.fromkeys(started)) == epochs
    assert f"seed 3 students: from 2 to 4 epochs; {said}\n" in capsys.readouterr().out
    after = kept(run)
    assert {path: after[path] for path in before} == before
    assert_same_students(run, long, ["ce", "hint"], "3")
    assert results(run)["teacher"]["max_epochs"] == 2
    assert "teacher: of 2 epochs; the run grew to 4 afterwards." in (run / "results.md").read_text()


ORDERS = ["seeds+students+epochs", "epochs students seeds", "epochs seeds students", "students epochs seeds"]


@pytest.mark.parametrize("order", mostly_slow(ORDERS, "seeds+students+epochs"))
def test_in_any_order_it_grows_to_the_same(order: str, run: Path, long: Path) -> None:
    for step in order.split():
        grown(run, *(flag for what in step.split("+") for flag in GROWTH[what]))
    assert_same_students(run, long)
    teachers = weights(run, ["teacher"])
    assert_same(teachers, weights(long, ["teacher"]))  # the new seed's, too, have two epochs
    assert not list(run.rglob("teacher.ckpt"))


def test_a_teacher_of_fewer_epochs_is_a_difference_between_runs(
    begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / "whole", tmp_path / "grown"]
    for run, epochs in zip(runs, (4, 2), strict=True):
        found = results(begun)
        found["config"]["trainer"]["max_epochs"], found["teacher"]["max_epochs"] = 4, epochs
        run.mkdir()
        (run / "results.json").write_text(json.dumps(found))
    compare.main([*map(str, runs), "--out", str(tmp_path / "compare")])
    told = capsys.readouterr().out
    assert "grown and whole differ in settings: teacher.max_epochs." in told
    assert "teacher.max_epochs — 2" in " ".join(told.split())


class Fading(Callback):
    """Lets the learning rate fall to zero at the Trainer's end."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 1e-3 * (1 - trainer.current_epoch / cast("int", trainer.max_epochs))


CAUTIOUS = {
    "callbacks": ([*EPOCHS, "--trainer.callbacks", f"{__name__}.Fading"], "--trainer.callbacks may depend on"),
    "one epoch": (["--trainer.max_epochs", "1"], "outputs are stored from two epochs on"),
}


@pytest.mark.parametrize("way", mostly_slow(CAUTIOUS, "callbacks"))
def test_where_more_epochs_begin_otherwise_students_start_again(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, said = CAUTIOUS[way]
    base = [*SMALL, *SEEDS, *ONLY, *flags]
    kd.main([*base, "--out", str(tmp_path / "run")])
    kd.main([*base, *MORE_EPOCHS, *_teachers(tmp_path / "run"), "--out", str(tmp_path / "whole")])
    capsys.readouterr()
    grown(tmp_path / "run", *MORE_EPOCHS)
    assert said in capsys.readouterr().out
    assert_same_students(tmp_path / "run", tmp_path / "whole")


# Killed, and on several processes


def start(out: Path, *flags: str, before: Callable[[], None] = lambda: None) -> Run:
    def main() -> None:
        Figure.draw = sketch  # type: ignore[method-assign]
        before()
        grown(out, *flags)

    return Run(main, log=out.with_suffix(".log"))


# Of a run that grows by all at once: seed 5's teacher has 6 batches, its students 12; seed 3's have 6, the new one 12.
MOMENTS = {
    "before the settings are written": (Session, "describe", 1, False),
    "after the settings are written": (Session, "describe", 1, True),
    "teacher of a new seed": (SafePoints, "on_train_batch_start", 4, True),
    "students of a new seed": (SafePoints, "on_train_batch_start", 12, True),
    "old students, before their first batch": (SafePoints, "on_train_batch_start", 19, False),
    "old students, in mid-epoch": (SafePoints, "on_train_batch_start", 21, True),
    "old students, one of two exported": (fits, "save_net", 5, True),
    "old students, exported and not recorded": (records, "write_json", 3, False),
    "between old and new": (records, "write_json", 3, True),
    "new student, in mid-epoch": (SafePoints, "on_train_batch_start", 30, True),
    "everything but the results": (bakeoff, "save_results", 1, False),
}


@pytest.mark.parametrize("moment", mostly_slow(MOMENTS, "old students, in mid-epoch"))
def test_killed_while_it_grows_it_ends_the_same(moment: str, run: Path, long: Path) -> None:
    growth = [flag for flags in GROWTH.values() for flag in flags]
    killed = start(run, *growth, "--checkpoint_every", "1e-9", before=kill_at(*MOMENTS[moment]))
    assert killed.wait() == -signal.SIGKILL, killed.output
    undated = moment == "before the settings are written"
    again = start(run, *(growth if undated else []))
    assert again.wait() == 0, again.output
    assert_same_students(run, long)
    assert_same(weights(run, ["teacher"]), weights(long, ["teacher"]))
    assert not list(run.rglob("*.tmp")) + list(run.rglob("teacher.ckpt"))


@pytest.mark.slow
def test_an_unfinished_run_grows_too(tmp_path: Path, long: Path, wide: Path) -> None:
    """Stopped among the students, with the teacher finished."""
    out, flags = tmp_path / "run", [*SMALL, *SEEDS, *ONLY, *EPOCHS, "--checkpoint_every", "1e-9"]

    def main() -> None:
        kill_at(SafePoints, "on_train_batch_start", 9, True)()
        kd.main([*flags, "--out", str(out)])

    killed = Run(main, log=tmp_path / "log")
    assert killed.wait() == -signal.SIGKILL, killed.output
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    grown(out, *MORE_SEEDS, *NEW)
    assert_started_so(out, wide)
    grown(copy, *(flag for more in GROWTH.values() for flag in more))
    assert_same_students(copy, long)


@pytest.mark.slow
def test_an_exact_run_grows_on_other_numbers_of_processes(tmp_path: Path) -> None:
    two = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
    starts = {
        "run": [*ONLY, *EPOCHS],
        "whole": [*NEW, *MORE_EPOCHS, *_teachers(tmp_path / "run"), *two],
    }
    for name, more in starts.items():
        one = Run(kd.main, [*SMALL, *SEEDS, "--exact", "3", *more, "--out", str(tmp_path / name)], log=tmp_path / "log")
        assert one.wait() == 0, one.output
    last = start(tmp_path / "run", *NEW, *MORE_EPOCHS, *two)
    assert last.wait() == 0, last.output
    assert_same_students(tmp_path / "run", tmp_path / "whole")


# Refused


REFUSED = {
    "a seed less": (["--seeds", "[5]"], "--seeds [5]: expected [3] or more, as the run in"),
    "fewer epochs": (["--trainer.max_epochs", "1"], "--trainer.max_epochs 1: expected 2 or more, as the run in"),
    "another rate": (["--scheduler.step_size", "2", *MORE_EPOCHS], "--scheduler.step_size 2: expected 1, as the run"),
    "a student in no list": (NEW[len(MORE) :], "--variants.new Hinton: expected new in --only, too: the run in"),
    "a student that can't learn": (
        [*MORE, "--variants.new", "Hint", "--variants.new.student_layer", "x"],
        "--variants.new.student_layer x: expected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_grow_is_refused_and_changes_nothing(
    kind: str, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, said = REFUSED[kind]
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("*") if path.is_file()}
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        grown(begun, *flags)
    assert stop.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}"), told
    assert told.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in begun.rglob("*") if path.is_file()} == before


# A language model


def test_a_language_model_grows_by_seeds_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--net.num_layers", "1", "--net.num_heads", "2", "--net.embed_dim", "16", "--data.block_size", "16"]
    base += ["--trainer.max_steps", "4", "--trainer.val_check_interval", "2", "--model.warmup_steps", "1"]
    base += ["--trainer.devices", "1", "--data.path", str(written(tmp_path))]
    gpt.main([*base, "--seeds", "2", "--out", str(tmp_path / "whole")])
    gpt.main([*base, "--seeds", "1", "--out", str(tmp_path / "run")])
    before = (tmp_path / "run/seed0/gpt/weights.pt").stat().st_mtime_ns
    gpt.main(["--out", str(tmp_path / "run"), "--resume", "true", "--seeds", "2"])
    assert (tmp_path / "run/seed0/gpt/weights.pt").stat().st_mtime_ns == before
    assert_same(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert curves(tmp_path / "run") == curves(tmp_path / "whole")
    found, whole = results(tmp_path / "run"), results(tmp_path / "whole")
    assert [timeless(run) for run in found.pop("runs")] == [timeless(run) for run in whole.pop("runs")]
    assert timeless(found) == timeless(whole)
    capsys.readouterr()
    with pytest.raises(SystemExit):
        gpt.main(["--out", str(tmp_path / "run"), "--resume", "true", "--trainer.max_steps", "8"])
    told = f"--trainer.max_steps 8: expected 4, as the run in {tmp_path / 'run'} was started: the learning rate of each"
    assert capsys.readouterr().err.startswith(f"error: {told}")
