"""Curves of training: a value has a point for each step that computed it, and a mean over what it is a mean of."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from harness.runs.quiet import quiet
from harness.runs.safepoints import SafePoints
from lit_modules.nets import Outputs
from lit_modules.objectives import CrossEntropy, Objective
from lit_modules.objectives.base import Term, ce_term
from lit_modules.objectives.context import NO_STEP, StepContext
from tests.callbacks import SaveAndStop, StopAt
from tests.language import on_policy
from tests.lit_modules.text.test_on_policy import chats, gkd, module
from tests.training import LinesLogger, digits, distil, fit, trainer

BATCHES, EPOCHS, CHANGE = 6, 3, 9  # 101 images in batches of 20; the second phase begins in the second epoch


class TwoPhases(Objective):
    """Learns from one term until half of the training, from another one after it."""

    uses_teacher = False

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        term = ce_term(student, labels, 1.0)
        return {"early" if context.progress < 0.5 else "late": term}


def trained(path: Path, *callbacks: Callback, **options: Any) -> tuple[Any, LinesLogger]:
    students, logger = distil({"phases": TwoPhases(), "ce": CrossEntropy()}), LinesLogger(path)
    safe = SafePoints(path.with_suffix(".ckpt"), every=1e9)
    steps: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "logger": logger,
        "log_every_n_steps": 1,
        "enable_checkpointing": True,
    }
    steps["callbacks"] = [safe, *callbacks]
    with quiet():
        trainer(1, **steps).fit(students, digits(batch_size=20), **options)
    return students, logger


def test_a_term_has_the_points_of_its_own_steps_and_their_mean(tmp_path: Path) -> None:
    students, logger = trained(tmp_path / "log", StopAt("ce", 14))
    early, late = (logger.values(f"phases/train/{name}") for name in ("early", "late"))
    assert (len(early), len(late)) == (CHANGE, BATCHES * EPOCHS - CHANGE)
    assert [len(logger.values(f"ce/train/{name}")) for name in ("loss", "lr-Adam", "grad_2.0_norm_total")] == [14] * 3
    sizes = [20] * 5 + [1]
    means = [epoch.get("phases/train/early") for epoch in students.training_log.epochs]
    assert means[0] == pytest.approx(sum(n * x for n, x in zip(sizes, early[:6], strict=True)) / 101)
    assert means[1] == pytest.approx(sum(early[6:]) / 3)  # over the three batches that had it
    assert means[2] is None
    assert students.training_log.epochs[1]["phases/train/late"] == pytest.approx((20 * sum(late[:2]) + late[2]) / 41)


@pytest.mark.parametrize("at", [8, 10, 15])
def test_a_resumed_run_has_the_curves_of_one_that_was_not_cut_off(at: int, tmp_path: Path) -> None:
    path = tmp_path / "middle.ckpt"
    whole, logger = trained(tmp_path / "whole", SaveAndStop(path, at, stop=False), StopAt("ce", 14))
    resumed, rest = trained(tmp_path / "rest", StopAt("ce", 14), ckpt_path=path, weights_only=True)
    assert resumed.training_log.epochs == whole.training_log.epochs
    whole_rows, rest_rows = (map(json.loads, log.path.read_text().splitlines()) for log in (logger, rest))
    assert [*rest_rows] == [row for row in whole_rows if row["step"] >= at]
    assert {*rest.values("step")} == {*range(at, BATCHES * EPOCHS)}


def test_values_of_written_texts_are_means_over_what_was_written(tmp_path: Path) -> None:
    students = module({"gkd": gkd(0.5), "ce": CrossEntropy()})
    counted: list[dict[str, float]] = []

    class Counts(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, *_: Any) -> None:
            counted.append({"ce": int((batch.labels >= 0).sum())})

        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            written = on_policy(pl_module).sizes_elsewhere(pl_module)
            counted[-1] |= {"gkd": written.get("gkd", counted[-1]["ce"])}

    logger = LinesLogger(tmp_path / "log")
    fit(students, chats(tmp_path), max_epochs=2, logger=logger, log_every_n_steps=1, callbacks=[Counts()])
    assert any(count["gkd"] != count["ce"] for count in counted)
    for name in ("ce", "gkd"):
        values, tokens = logger.values(f"{name}/train/loss"), [count[name] for count in counted]
        for number, epoch in enumerate(students.training_log.epochs):  # type: ignore[arg-type]
            steps = slice(3 * number, 3 * number + 3)
            expected = torch.tensor(values[steps]).double() @ torch.tensor(tokens[steps]).double() / sum(tokens[steps])
            assert epoch[f"{name}/train/loss"] == pytest.approx(expected.item(), rel=1e-6)
