"""The curves of a run that was killed ten times are those of an undisturbed one, point by point, in step and value."""

import signal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from apprentice import extras
from deploy import writers
from deploy.int8 import EXTRA, builder
from deploy.int8.graphs import quantizer
from experiments import gpt, kd, quantize
from harness.runs import records, safepoints
from harness.runs.nets import save_net
from harness.runs.safepoints import SafePoints
from harness.studies import fits, side_by_side
from tests.commands import curves, kill_at, start
from tests.experiments.test_gpt_experiment import NET
from tests.harness.test_resume import SMALL
from tests.language import written
from tests.training import net

Kill = tuple[Any, str, int, bool]  # of whom, which function, at which call, after it
EVERY = ["--checkpoint_every", "2"]  # batches here: what was logged after a checkpoint is logged again


def count_seconds_in_batches() -> None:
    """Write checkpoints after so many batches, on any machine."""
    batches, step = [0], SafePoints.on_train_batch_start

    def counted(*args: Any) -> None:
        batches[0] += 1
        step(*args)

    SafePoints.on_train_batch_start = counted  # type: ignore[method-assign]
    safepoints.time = SimpleNamespace(monotonic=lambda: float(batches[0]))  # type: ignore[assignment]


def ends_with(code: int, experiment: ModuleType, out: Path, *flags: str, kill: Kill | None = None) -> None:
    def before() -> None:
        count_seconds_in_batches()
        quantize.Study.run = lambda *args: None  # type: ignore[method-assign]  # files and latency, but no curves
        if kill is not None:
            kill_at(*kill)()

    start(out, *flags, before=before, main=experiment.main).check(code)


def batch(number: int) -> Kill:
    """Before that batch of a session, when all that belongs to the one before is done."""
    return SafePoints, "on_train_batch_start", number, False


TRAINED: Kill = safepoints.SafePoints, "on_train_end", 1, True
NOT_RECORDED: Kill = records, "write_json", 1, False
NOT_KEPT: Kill = builder, "atomic", 1, False


def assert_unharmed(experiment: ModuleType, flags: list[str], kills: list[Kill], folder: Path) -> None:
    """The run, killed so and resumed each time, has the curves of one that was not."""
    whole, out = folder / "whole", folder / "run"
    ends_with(0, experiment, whole, *flags)
    for number, kill in enumerate(kills):
        ends_with(-signal.SIGKILL, experiment, out, *flags, "--resume", str(number > 0), kill=kill)
    ends_with(0, experiment, out, *flags, "--resume", "true")
    found, expected = curves(out), curves(whole)
    assert found.keys() == expected.keys()
    for place, points in expected.items():
        assert found[place] == points, place


@pytest.mark.slow
def test_kd_killed_ten_times(tmp_path: Path) -> None:
    teacher = [batch(2), batch(6), TRAINED, NOT_RECORDED]
    students = [batch(2), batch(4), batch(6), NOT_RECORDED, (fits, "save_net", 2, True)]
    flags = [*SMALL, *EVERY, "--trainer.val_check_interval", "2"]
    assert_unharmed(kd, flags, [*teacher, *students, (side_by_side, "save_results", 1, False)], tmp_path)


@pytest.mark.slow
def test_gpt_killed_ten_times(tmp_path: Path) -> None:
    kills = [batch(2), *[batch(6)] * 6, TRAINED, NOT_RECORDED, (side_by_side, "save_results", 1, False)]
    flags = [*NET, *EVERY, "--data.path", str(written(tmp_path)), "--data.block_size", "16", "--data.batch_size", "13"]
    flags += ["--trainer.max_steps", "24", "--trainer.val_check_interval", "4", "--trainer.log_every_n_steps", "1"]
    assert_unharmed(gpt, flags, kills, tmp_path)


@pytest.fixture
def imported_once() -> None:
    """Spares each session the seconds that its extras take to be imported."""
    extras.need(*EXTRA)
    extras.need(*writers.EXTRA)
    quantizer(training=True)


@pytest.mark.slow
@pytest.mark.extras
@pytest.mark.usefixtures("imported_once", "one_thread")
def test_quantize_killed_ten_times(tmp_path: Path) -> None:
    kills = [batch(1), batch(2), batch(4), batch(6), batch(6), batch(5), TRAINED, NOT_KEPT, NOT_KEPT]
    arguments = {"input_shape": [1, 8, 8], "num_classes": 10}
    save_net(net(), {"class_path": "lit_modules.nets.LightNN", "init_args": arguments}, tmp_path / "net")
    flags = [*EVERY, "--run", str(tmp_path / "net"), "--data", "Digits", "--data.train_size", "100"]
    flags += ["--data.test_size", "100", "--data.validation_size", "20", "--data.batch_size", "40"]
    flags += ["--trainer.max_epochs", "4", "--freeze_epoch", "2", "--trainer.log_every_n_steps", "1"]
    assert_unharmed(quantize, flags, [*kills, (quantize.Study, "run", 1, False)], tmp_path)
