"""What a user sees of a run: a display on a terminal, lines elsewhere, Lightning's own bar on request."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from experiments import kd
from harness import cli
from harness.runs import progress
from harness.runs.options import RunOptions
from harness.runs.plans import FitPlan
from harness.runs.progress import Display, Lines, estimate_rest, is_live
from harness.runs.quiet import quiet
from harness.runs.records import FitRecord
from harness.runs.training_options import add_trainer
from tests.language import language_model, text
from tests.processes import Run
from tests.terminal import on_terminal
from tests.training import classifier, digits, distillation, fit

SMALL = ["--data", "Digits", "--seeds", "1", "--trainer.max_epochs", "3"]


def test_the_screen_of_a_run(tmp_path: Path) -> None:
    seen = on_terminal(kd.main, [*SMALL, "--out", str(tmp_path / "run")], columns=110)
    assert seen.code == 0, "\n".join(seen.lines)
    shown = [screen for screen in seen.screens if any("samples/s" in line for line in screen)]
    # A screen may be seen while it is drawn; its last line comes last.
    drawn = [s for s in shown if re.match(r"hint +\d\.\d{4} +0\.\d{4}$", next(filter(None, reversed(s))))]
    full = next(s for s in reversed(drawn) if any(line.startswith("seed 0 students  epoch 3/3  ━") for line in s))
    top = next(i for i, line in enumerate(full) if "samples/s" in line)
    assert re.fullmatch(r"seed 0 students  epoch 3/3  [━╸╺]{20}  [\d,]+ samples/s", full[top])
    assert re.fullmatch(r"0:00:\d\d left of this fit", full[top + 1])
    assert full[top + 2].split() == ["train/loss", "val/acc"]
    assert [line.split()[0] for line in full[top + 3 : top + 7]] == ["ce", "kd", "cosine", "hint"]
    assert all(re.fullmatch(r"\w+ +\d\.\d{4} +0\.\d{4}", line) for line in full[top + 3 : top + 7])
    assert not any(full[top + 7 :])
    piped = Run(kd.main, [*SMALL, "--out", str(tmp_path / "piped")], log=tmp_path / "log").check().splitlines()
    epochs = [without_seconds(line) for line in piped if line.startswith("seed ")]
    assert len(epochs) == 6
    assert re.fullmatch(r"kd: data Digits, .*", full[0])
    finished = [line for line in full[:top] if line.startswith("seed ")]
    assert len(finished) in {5, 6}  # the display is still there when the last epoch's line is printed
    assert [*map(without_seconds, finished)] == epochs[: len(finished)]
    # In the end the display is gone: from the first epoch to the table the lines are those of a pipe.
    assert between(seen.lines) == between(piped)
    assert seen.cursor


def between(lines: list[str]) -> list[str]:
    """From the first epoch to the table, without empty lines."""
    first, table = (next(i for i, line in enumerate(lines) if line.startswith(word)) for word in ("seed", "variant"))
    return [without_seconds(line) for line in lines[first:table] if line]


def without_seconds(line: str) -> str:
    assert not line.startswith("seed ") or re.search(r"  \d+\.\d s  ", line)
    return re.sub(r"  \d+\.\d s  ", "  # s  ", line)


def test_the_time_of_the_whole_run_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FitRecord, "read", lambda path: FitRecord(**json.loads(path.read_text())))

    def record(seed: int, name: str, seconds: float | None, epochs: int | None) -> None:
        (tmp_path / f"seed{seed}").mkdir(exist_ok=True)
        facts = {"fit_seconds": seconds, "max_epochs": epochs}
        (tmp_path / f"seed{seed}" / f"{name}.json").write_text(json.dumps(facts))

    def told(epochs: dict[tuple[int, str], int | None], seed: int, name: str) -> str | None:
        plans = [FitPlan(*fit, arms=(), epochs=count) for fit, count in epochs.items()]
        rest = estimate_rest(tmp_path, plans, next(plan for plan in plans if (plan.seed, plan.name) == (seed, name)))
        return rest and rest(4, 10)

    fits = {"teacher": 2, "students": 5}
    plan: dict[tuple[int, str], int | None] = {(seed, fit): fits[fit] for seed in (0, 1) for fit in fits}
    assert told(plan, 0, "teacher") == ", more than 0:00:14 of the run"  # nothing is known of students
    record(0, "teacher", 12.0, 2)
    record(0, "students", 5.0, 5)
    assert told(plan, 1, "teacher") == ", 0:00:09 of the run"
    assert told(plan, 1, "students") == ", 0:00:16 of the run"  # seed 1's teacher has left no record here
    grown = {**plan, (0, "students"): 25, (1, "students"): 25}
    assert told(grown, 1, "teacher") == ", 0:00:49 of the run"
    assert told(grown, 0, "students") == ", 0:00:26 of the run"  # this fit's epochs take 0.4 s, a teacher's 6 s
    record(1, "teacher", None, None)  # a loaded one
    assert told({**plan, (1, "teacher"): None}, 1, "students") is None


@pytest.mark.parametrize("every", [1, 2, 50])
def test_an_epochs_line_without_validation_has_its_mean(every: int, capsys: pytest.CaptureFixture[str]) -> None:
    data, module = digits(batch_size=37), classifier()
    fit(module, data, callbacks=[Lines("x")], max_epochs=3, log_every_n_steps=every)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("x  epoch")]
    expected = [f"train/acc {epoch['train/acc']:.4f}" for epoch in module.training_log.epochs]  # type: ignore[union-attr, index]
    assert [line.rpartition("  ")[2] for line in lines] == expected
    assert len(expected) == 3


def test_beside_the_first_epochs_bits_stands_the_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = text(tmp_path)
    module = language_model(data)
    fit(module, data, callbacks=[Lines("x")], max_epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("x  epoch")]
    loss = module.training_log.epochs[0]["train/loss"]  # type: ignore[index]
    bits = r"x  epoch {}/2  \d+\.\d s  val/bpc \d\.\d{{4}}"
    assert re.fullmatch(bits.format(1) + f"  train/loss {loss:.4f}", lines[0])
    assert re.fullmatch(bits.format(2), lines[1])


def tell() -> None:
    print("live" if is_live() else "plain")


@pytest.mark.parametrize(("env", "size", "expected"), [
    ({}, (80, 24), "live"), ({"TERM": "dumb"}, (80, 24), "plain"), ({"TERM": "unknown"}, (80, 24), "plain"),
    ({"NO_COLOR": "1"}, (80, 24), "plain"), ({}, (0, 0), "plain"),
])  # fmt: skip
def test_lines_where_a_terminal_can_not_be_redrawn(env: dict[str, str], size: tuple[int, int], expected: str) -> None:
    assert on_terminal(tell, columns=size[0], rows=size[1], **env).lines == [expected]


def test_lines_into_a_pipe() -> None:
    assert not is_live()


class Trainers:
    """Trainers as the experiments make them, with some flags."""

    def __init__(self, *flags: str) -> None:
        from harness.runs.trainer import trainer_factory

        parser = cli.Parser("x.py", "", RunOptions)
        add_trainer(parser, accelerator="cpu", max_epochs=1, logger=False)
        self.make = trainer_factory(parser.parse(list(flags)).trainer, None)

    def __call__(self, **kwargs: Any) -> Trainer:
        return self.make(enable_checkpointing=False, **kwargs)


@pytest.mark.parametrize(("flags", "expected"), [
    ([], Display), (["--trainer.enable_progress_bar", "false"], Lines),
    (["--trainer.enable_progress_bar", "true"], RichProgressBar),
    (["--trainer.callbacks", "TQDMProgressBar"], TQDMProgressBar),
])  # fmt: skip
def test_the_user_chooses_the_progress_bar(flags: list[str], expected: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_live", lambda: True)
    make = Trainers(*flags)
    shown = [c for c in make(show=progress.progress("x")).callbacks if isinstance(c, Lines | ProgressBar)]  # type: ignore[attr-defined]
    assert [type(callback) for callback in shown] == [expected]


def test_what_flags_ask_lightning_to_print_is_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    make = Trainers("--trainer.profiler", "simple", "--trainer.enable_model_summary", "true")
    with quiet():
        make(limit_train_batches=1, limit_val_batches=0).fit(classifier(), digits())
    assert "run_training_epoch" in caplog.text
    assert "Trainable params" in capsys.readouterr().out


def test_no_batch_passes_in_silence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SILENCE", -1)
    make, data = Trainers(), digits(batch_size=1000, validation_size=100)
    with quiet():
        trainer = make(show=progress.progress("label"), log_every_n_steps=1)
        trainer.fit(classifier(), data)
        trainer.test(trainer.lightning_module, data, verbose=False)
    lines = [re.sub(r"\d\.\d+", "X", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "label  epoch 1/1  batch 1/1  train/loss X",
        "label  epoch 1/1  validation batch 1/1  train/loss X",
        "label  epoch 1/1  X s  val/acc X",
        "label  test  test batch 1/1",
    ]


def test_a_line_within_an_epoch_has_each_runs_mean_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE", -1)
    students, means = distillation(["ce", "kd"]), list[str]()

    class Means(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            found = pl_module.training_log.epoch_means()
            means.append("  ".join(f"{run} {found[f'{run}/loss']:.4f}" for run in ("ce", "kd")))

    fit(students, digits(), callbacks=[Lines("x"), Means()], max_epochs=2, log_every_n_steps=50)
    lines = [line for line in capsys.readouterr().out.splitlines() if "  batch " in line]
    expected = [f"x  epoch {i // 3 + 1}/2  batch {i % 3 + 1}/3  train/loss {mean}" for i, mean in enumerate(means)]
    assert lines == expected
    assert len({*means}) == 6


def test_steps_are_counted_where_epochs_are_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SILENCE", -1)
    make, data = Trainers("--trainer.max_epochs", "-1", "--trainer.max_steps", "3"), digits(batch_size=1000)
    with quiet():
        make(show=progress.progress("label"), limit_val_batches=0).fit(classifier(), data)
    assert [line[:15] for line in capsys.readouterr().out.splitlines()] == [f"label  step {n}/3" for n in (1, 2, 3)]


def test_what_will_run_is_told_first(tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = ["--only", "ce", "--teacher", "LightNN", *SMALL, "--trainer.limit_train_batches", "1", "--out", str(out)]
    first = Run(kd.main, flags, log=tmp_path / "log").check().splitlines()[0]
    assert first == f"kd: data Digits, teacher LightNN, student LightNN, variants ce, seed 0; writes to {out}"
