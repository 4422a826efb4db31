"""Killed at any moment and started again, a run ends as if nothing had happened."""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments import kd
from harness.reports import interactive
from harness.runs import records, safepoints
from harness.runs.plans import Arm, FitPlan
from harness.runs.safepoints import SafePoints
from harness.studies import bakeoff, fits
from strategies import DDP, FSDP, DataParallel
from tests.figures import sketch
from tests.grids import mostly_slow
from tests.processes import Run, launch
from tests.training import assert_same, classifier, digits, trainer, weights

SMALL = [
    "--data.train_size", "150", "--data.test_size", "100", "--data.batch_size", "60", "--seeds", "[3]",
    "--only", "ce", "hint",
    "--teacher", "LightNN", "--trainer.max_epochs", "3", "--checkpoint_every", "1e-9", "--scheduler", "StepLR",
    "--scheduler.step_size", "1", "--trainer.log_every_n_steps", "1",
]  # fmt: skip
SHOWN = {"scalars": "value", "images": "encoded_image_string", "tensors": "tensor_proto"}
TIMES = {"step_ms", "fit_seconds", "students_fit_seconds"}


def start(out: Path, *more: str, before: Callable[[], None] | None = None) -> Run:
    def main() -> None:
        Figure.draw = sketch  # type: ignore[method-assign]  # in the fixture, too
        if before is not None:
            before()
        kd.main([*SMALL, "--out", str(out), *more])

    return Run(main, log=out.with_suffix(".log"))


def ended(out: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """All weights, and the results without what is a time or says where the run is."""
    weights = {}
    for path in sorted(out.glob("seed*/*/weights.pt")):
        weights |= {f"{path.parent.name}.{k}": v for k, v in torch.load(path, weights_only=True).items()}
    assert {key.split(".")[0] for key in weights} == {
        "teacher",
        *json.loads((out / "results.json").read_text())["students"],
    }

    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: timeless(v)
                for k, v in value.items()
                if k not in {*TIMES, "out", "resume", "devices", "checkpoint_every"}
            }
        return value

    return weights, timeless(json.loads((out / "results.json").read_text())) | {"curves": curves(out)}


MEASURED = {"cost/step_ms", "train/samples_per_sec", "train/peak_memory_mib"}  # values differ between runs, steps don't


def curves(out: Path) -> dict[tuple[str, str], list[tuple[int, Any]]]:
    """What TensorBoard shows but for times: steps and values by run and tag, each step once."""
    found = {}
    for folder in {path.parent for path in out.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder), size_guidance=dict.fromkeys(SHOWN, 0))
        events.Reload()
        for kind, value in SHOWN.items():
            for tag in events.Tags()[kind]:
                points = [(event.step, getattr(event, value)) for event in getattr(events, kind.capitalize())(tag)]
                points = [(step, tag in MEASURED or value) for step, value in points]
                steps = [step for step, _ in points]
                assert steps == sorted(set(steps)), (folder, tag, steps)
                found[str(folder.relative_to(out)), tag] = points
    return found


def trained_teacher(out: Path) -> Path:
    """The file that says so."""
    return out / "seed3" / "teacher.json"


def assert_same_end(out: Path, reference: tuple[dict[str, torch.Tensor], Any]) -> None:
    weights, results = ended(out)
    assert_same(weights, reference[0])
    assert results == reference[1]


@pytest.fixture(scope="module", params=mostly_slow([1, 2], 2))
def devices(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def undisturbed(devices: int, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], Any]:
    out = tmp_path_factory.mktemp("reference") / "run"
    run = start(out, "--trainer.devices", str(devices))
    assert run.wait() == 0, run.output
    return ended(out)


def kill_at(owner: Any, name: str, call: int, after: bool = False, since: Path | None = None) -> Callable[[], None]:
    """Have the main process killed at the n-th call of a function in rank zero, or right after it.

    Calls count from when a file exists: those of each fit's ranks, which are forked afresh, count for themselves.
    """

    def arm() -> None:
        main, function, torch_save, calls = os.getpid(), getattr(owner, name), torch.save, []

        def counted(*args: Any, **kwargs: Any) -> Any:
            if since is not None and not since.exists():
                return function(*args, **kwargs)
            calls.append(None)
            if len(calls) == call and not after:
                if function is torch_save:
                    Path(args[1]).write_bytes(b"half a checkpoint")
                die(main)
            result = function(*args, **kwargs)
            if len(calls) == call and after:
                die(main)
            return result

        setattr(owner, name, counted)

    def die(main: int) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            os.kill(main, signal.SIGKILL)
        time.sleep(60)

    return arm


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
    "everything but the results": (bakeoff, "save_results", 1, False),
    "in the middle of the results": (interactive, "write_json", 1, False),
}


@pytest.mark.parametrize("moment", mostly_slow(MOMENTS, "students, in mid-epoch"))
def test_killed_at_any_moment_it_ends_the_same(
    moment: str, devices: int, undisturbed: tuple[dict[str, torch.Tensor], Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = ["--trainer.devices", str(devices)]
    of_students = moment.startswith("students")
    since = trained_teacher(out) if of_students else None
    killed = start(out, *flags, before=kill_at(*MOMENTS[moment], since=since))
    assert killed.wait() == -signal.SIGKILL, killed.output
    assert not of_students or (out / "seed3" / "students.ckpt").exists()
    resumed = start(out, *flags, "--resume", "true")
    assert resumed.wait() == 0, resumed.output
    assert_same_end(out, undisturbed)
    assert [path.name for path in out.rglob("*.ckpt")] == ["students.ckpt"]
    assert not list(out.rglob("*.tmp"))


KEPT = {
    "a memory, parts, another net, peers": [
        *("--zoo", "true", "--only", "ce", "crd", "simkd", "fitnet", "dkd", "a"), "--variants.a", "DML",
        "--variants.a.peers", "[b]", "--variants.b", "DML", "--variants.b.peers", "[a]",
    ],
    "hidden labels": ["--data.labelled", "20"],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kept", KEPT)
def test_what_methods_keep_survives_a_kill(kept: str, tmp_path: Path) -> None:
    whole = start(tmp_path / "whole", *KEPT[kept])
    assert whole.wait() == 0, whole.output
    out, in_mid_epoch = tmp_path / "run", MOMENTS["students, in mid-epoch"]
    killed = start(out, *KEPT[kept], before=kill_at(*in_mid_epoch, since=trained_teacher(out)))
    assert killed.wait() == -signal.SIGKILL, killed.output
    assert (out / "seed3" / "students.ckpt").exists()
    resumed = start(out, *KEPT[kept], "--resume", "true")
    assert resumed.wait() == 0, resumed.output
    assert_same_end(out, ended(tmp_path / "whole"))


@pytest.mark.slow
def test_a_run_that_accumulates_gradients_goes_on_between_steps(tmp_path: Path) -> None:
    flags = ["--trainer.accumulate_grad_batches", "2"]
    whole = start(tmp_path / "whole", *flags)
    assert whole.wait() == 0, whole.output
    killed = start(tmp_path / "run", *flags, before=kill_at(SafePoints, "on_train_batch_start", 6, after=True))
    assert killed.wait() == -signal.SIGKILL
    resumed = start(tmp_path / "run", "--resume", "true")
    assert resumed.wait() == 0, resumed.output
    assert_same_end(tmp_path / "run", ended(tmp_path / "whole"))


@pytest.mark.slow
def test_exact_runs_go_on_with_the_same_bits_on_other_numbers_of_processes(tmp_path: Path) -> None:
    exact, out = ["--exact", "8", "--data.augment", "true"], tmp_path / "run"
    whole = start(tmp_path / "whole", *exact)
    assert whole.wait() == 0, whole.output
    # On 8 processes in the teacher's second epoch, then on 3 in the students' last one: of the teacher 5 batches are
    # left then, and the ranks of each fit count for themselves.
    for devices, call, resume in ((8, 5, "false"), (3, 8, "true")):
        flags = ["--trainer.devices", str(devices), "--resume", resume, *(exact if resume == "false" else [])]
        killed = start(out, *flags, before=kill_at(SafePoints, "on_train_batch_start", call, after=True))
        assert killed.wait() == -signal.SIGKILL, killed.output
    assert (out / "seed3" / "students.ckpt").exists()
    last = start(out, "--trainer.devices", "1", "--resume", "true")
    assert last.wait() == 0, last.output
    assert_same_end(out, ended(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("signum", "whole_group"),
    mostly_slow(product((signal.SIGINT, signal.SIGTERM), (False, True)), (signal.SIGINT, True)),
    ids=["SIGINT-kill", "SIGINT-terminal", "SIGTERM-kill", "SIGTERM-terminal"],
)
def test_a_signal_saves_first_and_says_how_to_go_on(
    signum: int, whole_group: bool, devices: int, undisturbed: tuple[dict[str, torch.Tensor], Any], tmp_path: Path
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
    stopped = start(out, *flags, before=arm)
    assert stopped.wait() == 128 + signum, stopped.output
    assert f"--out {out} --resume true" in stopped.output
    assert "Traceback" not in stopped.output
    state = safepoints.read(out / "seed3" / "teacher.ckpt")
    assert state["global_step"] == 4  # nothing is repeated
    resumed = start(out, *flags, "--resume", "true")
    assert resumed.wait() == 0, resumed.output
    assert_same_end(out, undisturbed)


def test_nothing_finished_is_done_again_and_a_second_run_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert start(out).wait() == 0
    before = {p: p.stat().st_mtime_ns for p in out.rglob("weights.pt")}

    def arm() -> None:
        fits.Trainer.fit = None  # type: ignore[method-assign, assignment]

    again = start(out, "--resume", "true", before=arm)
    assert again.wait() == 0, again.output
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("weights.pt")}
    said = again.output
    refused = start(out)
    assert refused.wait() == 2
    assert refused.output.removeprefix(said).splitlines()[-1].startswith(f"error: --out {out}: expected a new folder")
    assert refused.output.count("\n") - said.count("\n") == 2  # what would run, and why not
    assert start(out, "--overwrite", "true").wait() == 0
    assert before != {p: p.stat().st_mtime_ns for p in out.rglob("weights.pt")}


def test_two_runs_at_once_in_one_folder_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"

    def slow() -> None:
        step = SafePoints.on_train_batch_start
        SafePoints.on_train_batch_start = lambda *a: (time.sleep(3), step(*a))[1]  # type: ignore[method-assign, assignment]

    first = start(out, before=slow)
    while not (out / ".pid").exists():
        time.sleep(0.05)
    second = start(out, "--resume", "true")
    assert second.wait() == 2
    assert f"process {first.process.pid} works in it" in second.output
    os.kill(first.process.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL


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
    facts = {"scores": found.scores, "seconds": found.seconds, "samples": module.samples}
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
    from harness.runs.folders import new_folder

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
