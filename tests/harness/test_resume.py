"""Killed at any moment and started again, a run ends as if nothing had happened."""

import os
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from harness.reports.bakeoff import save
from harness.runs import records, safepoints
from harness.runs.folders import new_folder
from harness.runs.plans import Arm, FitPlan
from harness.runs.safepoints import SafePoints
from harness.studies import fits, side_by_side
from strategies import DDP, FSDP, DataParallel
from tests import commands
from tests.commands import curves, kill_at, lasting, nets, results
from tests.grids import mostly_slow
from tests.processes import Run, launch
from tests.training import assert_same, classifier, digits, trainer, weights

SMALL = [
    "--data", "Digits",
    "--data.train_size", "150", "--data.test_size", "100", "--data.batch_size", "60", "--seeds", "[3]",
    "--only", "ce", "hint",
    "--teacher", "LightNN", "--trainer.max_epochs", "3", "--checkpoint_every", "1e-9", "--scheduler", "StepLR",
    "--scheduler.step_size", "1", "--trainer.log_every_n_steps", "1",
]  # fmt: skip


def start(out: Path, *more: str, before: Callable[[], None] | None = None) -> Run:
    return commands.start(out, *SMALL, *more, before=before)


def ended(out: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """All weights, and the results without what is a time or says where the run is."""
    facts, weights = results(out), nets(out)
    assert {key.partition(".")[0] for key in weights} == {f"seed3/{name}" for name in ("teacher", *facts["students"])}
    return weights, lasting(facts) | {"curves": curves(out)}


def trained_teacher(out: Path) -> Path:
    """The file that says so."""
    return out / "seed3" / "teacher.json"


def assert_same_end(out: Path, reference: tuple[dict[str, torch.Tensor], Any]) -> None:
    weights, results = ended(out)
    assert_same(weights, reference[0])
    assert results == reference[1]


Undisturbed = Callable[[int], tuple[dict[str, torch.Tensor], Any]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """How a run on so many processes ends."""

    @cache
    def run(devices: int) -> tuple[dict[str, torch.Tensor], Any]:
        out = tmp_path_factory.mktemp("reference") / "run"
        start(out, "--trainer.devices", str(devices)).check()
        return ended(out)

    return run


MOMENTS = {
    "before the first batch": (SafePoints, "on_train_batch_start", 1, False),
    "teacher, in the first epoch": (SafePoints, "on_train_batch_start", 2, True),
    "teacher, first batch of an epoch": (SafePoints, "on_train_batch_start", 4, True),
    "teacher, in the last epoch": (SafePoints, "on_train_batch_start", 8, False),
    "teacher, in the middle of writing a checkpoint": (torch, "save", 5, False),
    "teacher, between a checkpoint's write and its rename": (Path, "replace", 9, False),
    "teacher, trained and not tested": (fits.SafePoints, "on_train_end", 1, True),
    "teacher, before its weights are written": (fits, "save_net", 1, False),
    "teacher, exported and not recorded": (records, "write_json", 1, False),
    "between teacher and students": (records, "write_json", 1, True),
    "students, in mid-epoch": (SafePoints, "on_train_batch_start", 5, True),
    "students, between a checkpoint's write and its rename": (Path, "replace", 5, False),
    "students, one of two exported": (fits, "save_net", 1, True),
    "everything but the results": (side_by_side, "save_results", 1, False),
    "in the middle of the results": (save, "write_json", 1, False),
}


# On one process: tests/harness/test_growth.py has the others, of a run that grows.
ON_ONE_PROCESS = [*[*MOMENTS][4:7], "in the middle of the results"]


@pytest.mark.parametrize(
    ("devices", "moment"),
    mostly_slow([*product([2], MOMENTS), *product([1], ON_ONE_PROCESS)], (2, "students, in mid-epoch")),
)
def test_killed_at_any_moment_it_ends_the_same(
    moment: str, devices: int, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = ["--trainer.devices", str(devices)]
    of_students = moment.startswith("students")
    since = trained_teacher(out) if of_students else None
    start(out, *flags, before=kill_at(*MOMENTS[moment], since=since)).check(-signal.SIGKILL)
    assert not of_students or (out / "seed3" / "students.ckpt").exists()
    start(out, *flags, "--resume", "true").check()
    assert_same_end(out, undisturbed(devices))
    assert [path.name for path in out.rglob("*.ckpt")] == ["students.ckpt"]
    assert not list(out.rglob("*.tmp"))


KEPT = {
    "a memory, parts, another net, peers": [
        *("--zoo", "true", "--only", "ce", "crd", "simkd", "fitnet", "dkd", "a"),
        *("--variants.a", "DML", "--variants.a.peers", "[b]", "--variants.b", "DML", "--variants.b.peers", "[a]"),
    ],
    "hidden labels": ["--data.labelled", "20"],
    "averages": ["--ema", "0.9", "--best_epoch", "val/loss"],
    "best epochs, stopped students": ["--best_epoch", "val/acc", "--early_stopping", "val/acc", "--patience", "1"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_what_methods_keep_survives_a_kill(kept: str, tmp_path: Path) -> None:
    start(tmp_path / "whole", *KEPT[kept]).check()
    out, in_mid_epoch = tmp_path / "run", MOMENTS["students, in mid-epoch"]
    start(out, *KEPT[kept], before=kill_at(*in_mid_epoch, since=trained_teacher(out))).check(-signal.SIGKILL)
    assert (out / "seed3" / "students.ckpt").exists()
    start(out, *KEPT[kept], "--resume", "true").check()
    assert_same_end(out, ended(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_that_accumulates_gradients_goes_on_between_steps(tmp_path: Path) -> None:
    flags = ["--trainer.accumulate_grad_batches", "2"]
    start(tmp_path / "whole", *flags).check()
    killed = kill_at(SafePoints, "on_train_batch_start", 6, after=True)
    start(tmp_path / "run", *flags, before=killed).check(-signal.SIGKILL)
    start(tmp_path / "run", "--resume", "true").check()
    assert_same_end(tmp_path / "run", ended(tmp_path / "whole"))


@pytest.mark.slow
def test_exact_runs_go_on_with_the_same_bits_on_other_numbers_of_processes(tmp_path: Path) -> None:
    exact, out = ["--exact", "8", "--data.augment", "true"], tmp_path / "run"
    start(tmp_path / "whole", *exact).check()
    # On 8 processes in the teacher's second epoch, then on 3 in the students' last one: of the teacher 5 batches are
    # left then, and the ranks of each fit count for themselves.
    for devices, call, resume in ((8, 5, "false"), (3, 8, "true")):
        flags = ["--trainer.devices", str(devices), "--resume", resume, *(exact if resume == "false" else [])]
        start(out, *flags, before=kill_at(SafePoints, "on_train_batch_start", call, after=True)).check(-signal.SIGKILL)
    assert (out / "seed3" / "students.ckpt").exists()
    start(out, "--trainer.devices", "1", "--resume", "true").check()
    assert_same_end(out, ended(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("signum", "whole_group"),
    mostly_slow(product((signal.SIGINT, signal.SIGTERM), (False, True)), (signal.SIGINT, True)),
    ids=["SIGINT-kill", "SIGINT-terminal", "SIGTERM-kill", "SIGTERM-terminal"],
)
@pytest.mark.parametrize("devices", mostly_slow([1, 2], 2))
def test_a_signal_saves_first_and_says_how_to_go_on(
    signum: int, whole_group: bool, devices: int, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    seen: list[int] = []

    def arm() -> None:
        main, step = os.getpid(), SafePoints.on_train_batch_start

        def counted(*args: Any) -> None:
            seen.append(1)
            if len(seen) == 5 and os.environ.get("LOCAL_RANK", "0") == "0":
                (os.killpg if whole_group else os.kill)(main, signum)
                time.sleep(0.3)
            step(*args)

        SafePoints.on_train_batch_start = counted  # type: ignore[method-assign]

    flags = ["--trainer.devices", str(devices), "--checkpoint_every", "1000"]
    output = start(out, *flags, before=arm).check(128 + signum)
    assert f"--out {out} --resume true" in output
    assert "Traceback" not in output
    state = safepoints.read(out / "seed3" / "teacher.ckpt")
    assert state["global_step"] == 4  # nothing is repeated
    start(out, *flags, "--resume", "true").check()
    assert_same_end(out, undisturbed(devices))


def test_nothing_finished_is_done_again_and_a_second_run_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in out.rglob("weights.pt")}

    def arm() -> None:
        fits.Trainer.fit = None  # type: ignore[method-assign, assignment]

    start(out).check()
    before = written()
    said = start(out, "--resume", "true", before=arm).check()
    assert before == written()
    refused = start(out).check(2).removeprefix(said).splitlines()
    assert len(refused) == 2  # what would run, and why not
    assert refused[-1].startswith(f"error: --out {out}: expected a new folder")
    start(out, "--overwrite", "true").check()
    assert before != written()


def test_two_runs_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def slow() -> None:
        step = SafePoints.on_train_batch_start
        SafePoints.on_train_batch_start = lambda *a: (time.sleep(3), step(*a))[1]  # type: ignore[method-assign, assignment]

    first = start(out, before=slow)
    while not (out / ".pid").exists():
        time.sleep(0.05)
    assert f"process {first.process.pid} works in it" in start(out, "--resume", "true").check(2)
    os.kill(first.process.pid, signal.SIGKILL)
    first.check(-signal.SIGKILL)


def fitted(make: Callable[..., DataParallel], rank: int, path: Path) -> None:
    def slow(content: Any, file: Path) -> None:
        file.write_bytes(b"half a checkpoint")
        time.sleep(0.4)
        save(content, file)

    def made(**kwargs: Any) -> Trainer:
        return trainer(2, strategy=make(timeout=60), max_epochs=1, **kwargs)

    save, torch.save = torch.save, slow
    config = SimpleNamespace(checkpoint_every=1e-9)
    run: Any = SimpleNamespace(
        out=path, data=digits(), trainer=made, config=config, tensorboard=False, loggers=lambda fit: []
    )
    module = classifier()
    found = fits.fit_and_test(run, FitPlan(0, "run", (Arm("run", "net"),)), module)
    facts = {"scores": found.scores, "seconds": found.seconds, "samples": module.training_log.samples}
    save({"weights": weights(module), "facts": facts}, path / str(rank))


@pytest.mark.parametrize("make", mostly_slow([DDP, FSDP], DDP))
def test_no_rank_reads_a_checkpoint_before_it_is_written(make: Callable[..., DataParallel], tmp_path: Path) -> None:
    ranks = launch(partial(fitted, make), tmp_path)
    assert [rank.wait() for rank in ranks] == [0, 0], "".join(rank.output for rank in ranks)
    one, other = (torch.load(tmp_path / str(rank), weights_only=True) for rank in range(2))
    assert_same(one["weights"], other["weights"])
    assert one["facts"] == other["facts"]  # Lightning sends rank zero's weights to all to be tested, but nothing else


def test_checkpoints_are_as_far_apart_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, written = [0.0], []
    points = SafePoints(tmp_path / "x.ckpt", every=30)
    monkeypatch.setattr(safepoints.time, "monotonic", lambda: clock[0])

    class Trainer:
        world_size, accumulate_grad_batches, global_step, loggers, is_global_zero = 1, 1, 0, (), True
        max_epochs = 1
        fit_loop = SimpleNamespace(epoch_loop=SimpleNamespace())

        def save_checkpoint(self, path: Path) -> None:
            written.append(clock[0])

    trainer: Any = Trainer()
    points.on_fit_start(trainer, None)  # type: ignore[arg-type]
    for batch in range(20):
        clock[0] += 7  # seconds a batch
        points.on_train_batch_start(trainer, None, None, batch)  # type: ignore[arg-type]
    assert written == [35, 70, 105, 140]  # never more than 30 seconds and a batch are lost


def test_without_out_each_invocation_has_a_folder_and_its_processes_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APPRENTICE_OUT_KD", raising=False)
    first = new_folder("kd")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert new_folder("kd") == first  # a sub-process that inherits the environment
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("APPRENTICE_OUT_KD")
    second = new_folder("kd")
    assert second != first
    assert {first.parent, second.parent} == {Path("runs/kd")}
    assert second.is_dir()
