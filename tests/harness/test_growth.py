"""A finished run that grows is one that was started so: more seeds, more students, more epochs."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from experiments import compare, gpt, kd
from harness.runs import records
from harness.runs.safepoints import SafePoints
from harness.runs.session import Session
from harness.studies import fits, side_by_side
from tests.commands import Refusal, curves, kill_at, lasting, nets, results, run_of, start
from tests.grids import mostly_slow
from tests.language import written
from tests.training import assert_same

CONSTANT_RATE = [
    "--data", "Digits",
    "--data.train_size", "150", "--data.test_size", "100", "--data.batch_size", "60", "--teacher", "LightNN",
    "--trainer.log_every_n_steps", "1", "--trainer.strategy", "auto", "--trainer.devices", "1",
]  # fmt: skip
SMALL = [*CONSTANT_RATE, "--scheduler", "StepLR", "--scheduler.step_size", "1"]
EPOCHS, MORE_EPOCHS = ["--trainer.max_epochs", "2"], ["--trainer.max_epochs", "4"]
SEEDS, MORE_SEEDS = ["--seeds", "[3]"], ["--seeds", "[5, 3]"]
ONLY, MORE = ["--only", "ce", "hint"], ["--only", "ce", "hint", "new"]
NEW = [*MORE, "--variants.new", "Hinton", "--variants.new.temperature", "8"]
GROWTH = {"seeds": MORE_SEEDS, "students": NEW, "epochs": MORE_EPOCHS}


def grown(out: Path, *flags: str) -> Path:
    kd.main(["--out", str(out), "--resume", "true", *flags])
    return out


begun = run_of(kd, *SMALL, *SEEDS, *ONLY, *EPOCHS)  # the run that grows: a seed, two students, two epochs


wide = run_of(kd, *SMALL, *MORE_SEEDS, *NEW, *EPOCHS)  # started with all seeds and students, for two epochs


@pytest.fixture(scope="module")
def long(wide: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All seeds and students for four epochs, from teachers of two."""
    out = tmp_path_factory.mktemp("long") / "run"
    kd.main([*SMALL, *MORE_SEEDS, *NEW, *MORE_EPOCHS, *_teachers(wide), "--out", str(out)])
    return out


def _teachers(out: Path) -> list[str]:
    return ["--teacher_ckpt", str(out / "seed{seed}/teacher/weights.pt")]


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(begun, tmp_path / "run"))


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
    assert_same(nets(out), nets(whole))
    assert lasting(results(out)) == lasting(results(whole))
    assert own_curves(out) == own_curves(whole)
    settings = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (out, whole)]
    assert [each | {"checkpoint_every": 30.0} for each in settings] == [settings[1], settings[1]]


def assert_same_students(out: Path, whole: Path, *chosen: str) -> None:
    """Of runs that differ in how they came by their teachers: all nets, facts and curves of students, or of a few."""
    ours, theirs = (_students(folder) for folder in (out, whole))
    if not chosen:
        assert_same(nets(out), nets(whole))
        chosen = (*theirs,)
    for name in chosen:
        assert_same(nets(out, name), nets(whole, name))
        assert ours[name] == theirs[name]
    found, expected = own_curves(out), own_curves(whole)
    students = [key for key in expected if key[0] in chosen]
    assert students
    assert {key: found.get(key) for key in students} == {key: expected[key] for key in students}


def _students(out: Path) -> dict[str, Any]:
    """What records have of students, by folder."""
    records = {path: json.loads(path.read_text())["nets"] for path in out.glob("seed*/students*.json")}
    return {f"{path.parent.name}/{name}": lasting(net) for path, nets in records.items() for name, net in nets.items()}


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
def test_a_net_that_is_missing_is_noticed(lost: str, more: list[str], run: Path, refusal: Refusal) -> None:
    path = run / "seed3" / lost
    path.unlink()
    before = kept(run)
    record = run / "seed3" / ("teacher.json" if "teacher" in lost else "students.json")
    expected = f"the nets of finished fits; without it, delete {record}, and they are trained again"
    assert refusal(kd.main, "--out", run, "--resume", "true", *more) == f"--out {path}: expected {expected}"
    assert kept(run) == before


def test_nets_that_are_missing_are_trained_again_to_the_same(run: Path, begun: Path) -> None:
    shutil.rmtree(run / "seed3/teacher")
    (run / "seed3/teacher.json").unlink()
    grown(run)
    assert_same(nets(run), nets(begun))
    assert lasting(results(run)) == lasting(results(begun))


# Epochs


WAYS = {
    "seed3/students.ckpt": (
        [0, 1, 2, 3],
        "starts again, as the folder has no checkpoint of it; the result is the same",
    ),
    None: ([2, 3], "goes on"),
}


@pytest.mark.parametrize("lost", WAYS)
def test_with_more_epochs_students_are_those_of_a_run_with_the_teachers(
    lost: str | None, run: Path, long: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    epochs, said = WAYS[lost]
    started, step = [], SafePoints.on_train_batch_start
    monkeypatch.setattr(
        SafePoints, "on_train_batch_start", lambda *args: (started.append(args[1].current_epoch), step(*args))
    )
    if lost:
        (run / lost).unlink()
    before = kept(run, "ce", "hint", "students.json", "students.ckpt")
    grown(run, *MORE_EPOCHS)
    assert list(dict.fromkeys(started)) == epochs
    assert f"seed 3 students: from 2 to 4 epochs; {said}\n" in capsys.readouterr().out
    after = kept(run)
    assert {path: after[path] for path in before} == before
    assert_same_students(run, long, "seed3/ce", "seed3/hint")
    assert results(run)["teacher"]["max_epochs"] == 2
    assert "teacher: of 2 epochs; the run grew to 4 afterwards." in (run / "results.md").read_text()


ORDERS = ["seeds+students+epochs", "epochs students seeds", "epochs seeds students", "students epochs seeds"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_in_any_order_it_grows_to_the_same(order: str, run: Path, long: Path) -> None:
    for step in order.split():
        grown(run, *(flag for what in step.split("+") for flag in GROWTH[what]))
    assert_same_students(run, long)
    assert_same(nets(run, "seed*/teacher"), nets(long, "seed*/teacher"))  # the new seed's, too, have two epochs
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
    "callbacks": ([*EPOCHS, "--trainer.callbacks", f"{__name__}.Fading"], "callbacks may depend on"),
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
    "everything but the results": (side_by_side, "save_results", 1, False),
}


@pytest.mark.parametrize("moment", mostly_slow(MOMENTS, "old students, in mid-epoch"))
def test_killed_while_it_grows_it_ends_the_same(moment: str, run: Path, long: Path) -> None:
    growth = [flag for flags in GROWTH.values() for flag in flags]
    killed = [*growth, "--resume", "true", "--checkpoint_every", "1e-9"]
    start(run, *killed, before=kill_at(*MOMENTS[moment])).check(-signal.SIGKILL)
    undated = moment == "before the settings are written"
    start(run, "--resume", "true", *(growth if undated else [])).check()
    assert_same_students(run, long)
    assert_same(nets(run, "seed*/teacher"), nets(long, "seed*/teacher"))
    assert not list(run.rglob("*.tmp")) + list(run.rglob("teacher.ckpt"))


@pytest.mark.slow
def test_an_unfinished_run_grows_too(tmp_path: Path, long: Path, wide: Path) -> None:
    """Stopped among the students, with the teacher finished."""
    out, killed = tmp_path / "run", kill_at(SafePoints, "on_train_batch_start", 9, True)
    start(out, *SMALL, *SEEDS, *ONLY, *EPOCHS, "--checkpoint_every", "1e-9", before=killed).check(-signal.SIGKILL)
    copy = Path(shutil.copytree(out, tmp_path / "copy"))
    grown(out, *MORE_SEEDS, *NEW)
    assert_started_so(out, wide)
    grown(copy, *(flag for more in GROWTH.values() for flag in more))
    assert_same_students(copy, long)


@pytest.mark.slow
def test_a_schedule_over_all_epochs_begins_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    small = [*CONSTANT_RATE, "--scheduler", "CosineWarmup", "--scheduler.warmup_epochs", "1"]
    kd.main([*small, *SEEDS, *ONLY, *EPOCHS, "--out", str(run)])
    kd.main([*small, *SEEDS, *ONLY, *MORE_EPOCHS, *_teachers(run), "--out", str(whole)])
    capsys.readouterr()
    grown(run, *MORE_EPOCHS)
    assert (
        "starts again, as CosineWarmup depends on the number of epochs; the result is the same"
        in capsys.readouterr()[0]
    )
    assert_same_students(run, whole)


@pytest.mark.slow
def test_an_exact_run_grows_on_other_numbers_of_processes(tmp_path: Path) -> None:
    two = ["--trainer.strategy", "ddp_fork", "--trainer.devices", "2"]
    more = {"run": [*ONLY, *EPOCHS], "whole": [*NEW, *MORE_EPOCHS, *_teachers(tmp_path / "run"), *two]}
    for name, flags in more.items():
        start(tmp_path / name, *SMALL, *SEEDS, "--exact", "3", *flags).check()
    start(tmp_path / "run", "--resume", "true", *NEW, *MORE_EPOCHS, *two).check()
    assert_same_students(tmp_path / "run", tmp_path / "whole")


# Refused


@pytest.mark.parametrize(("flags", "said"), [
    (["--seeds", "[5]"], "--seeds [5]: expected [3] or more, as the run in"),
    (["--trainer.max_epochs", "1"], "--trainer.max_epochs 1: expected 2 or more, as the run in"),
    (["--scheduler.step_size", "2", *MORE_EPOCHS], "--scheduler.step_size 2: expected 1, as the run"),
    (NEW[len(MORE) :], "--variants.new Hinton: expected new in --only, too: the run in"),
    ([*MORE, "--variants.new", "Hint", "--variants.new.student_layer", "x"],
     "--variants.new.student_layer x: expected"),
], ids=["seed", "epochs", "rate", "list", "student"])  # fmt: skip
def test_what_does_not_grow_is_refused_and_changes_nothing(
    flags: list[str], said: str, begun: Path, refusal: Refusal
) -> None:
    before = {path: path.stat().st_mtime_ns for path in begun.rglob("*") if path.is_file()}
    assert refusal(kd.main, "--out", begun, "--resume", "true", *flags).startswith(said)
    assert {path: path.stat().st_mtime_ns for path in begun.rglob("*") if path.is_file()} == before


# A language model


def test_a_language_model_grows_by_seeds_alone(tmp_path: Path, refusal: Refusal) -> None:
    base = ["--net.num_layers", "1", "--net.num_heads", "2", "--net.embed_dim", "16", "--data.block_size", "16"]
    base += ["--trainer.max_steps", "4", "--trainer.val_check_interval", "2", "--model.warmup_steps", "1"]
    base += ["--trainer.devices", "1", "--data.path", str(written(tmp_path))]
    run, whole = tmp_path / "run", tmp_path / "whole"
    gpt.main([*base, "--seeds", "2", "--out", str(whole)])
    gpt.main([*base, "--seeds", "1", "--out", str(run)])
    before = (run / "seed0/gpt/weights.pt").stat().st_mtime_ns
    gpt.main(["--out", str(run), "--resume", "true", "--seeds", "2"])
    assert (run / "seed0/gpt/weights.pt").stat().st_mtime_ns == before
    assert_same(nets(run), nets(whole))
    assert curves(run) == curves(whole)
    assert lasting(results(run)) == lasting(results(whole))
    line = refusal(gpt.main, "--out", run, "--resume", "true", "--trainer.max_steps", "8")
    said = f"--trainer.max_steps 8: expected 4, as the run in {run} was started: the learning rate of each"
    assert line.startswith(said)
