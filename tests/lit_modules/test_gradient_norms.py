"""The gradient norms that a fit logs: those of the global batch's gradients, on any number of devices."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from tests.grids import mostly_slow
from tests.training import LinesLogger, assert_same, distillation, fit, on, weights
from tests.training import digits as data

TAG = "{}/train/grad_2.0_norm_total"
NAMES = ("ce", "cosine")


class Norms(Callback):
    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {name: [] for name in NAMES}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        for name in NAMES:
            gradients = [p.grad.flatten().double() for p in pl_module.students[name].parameters()]
            self.found[name].append(float(torch.cat(gradients).norm()))


def logged(path: Path, place: str = "auto 1", **kwargs: Any) -> tuple[dict[str, list[float]], LightningModule]:
    logger = LinesLogger(path)
    options = {"logger": logger, "log_every_n_steps": 1, "gradient_clip_val": 0.01} | kwargs
    module = fit(distillation([*NAMES]), data(), **on(place), **options)
    return {name: logger.values(TAG.format(name)) for name in NAMES}, module


def test_norms_are_those_before_clipping_and_move_no_bit(tmp_path: Path) -> None:
    norms = Norms()
    found, module = logged(tmp_path / "log", callbacks=[norms])
    for name in NAMES:
        assert found[name] == pytest.approx(norms.found[name], rel=1e-6)
        assert len(found[name]) == 6
        assert min(found[name]) > 0.01
    silent = fit(distillation([*NAMES]), data(), gradient_clip_val=0.01)
    assert_same(weights(module), weights(silent))


def test_norms_are_logged_at_the_steps_of_all_logs(tmp_path: Path) -> None:
    found, _ = logged(tmp_path / "every", log_every_n_steps=2)
    everything, _ = logged(tmp_path / "all")
    assert found == {name: values[1::2] for name, values in everything.items()}


@pytest.mark.parametrize("place", mostly_slow(["ddp 2", "fsdp 2", "pipeline 2"], "ddp 2"))
def test_norms_are_the_same_from_two_processes(place: str, tmp_path: Path) -> None:
    options = {"precision": "64-true", "gradient_clip_val": None}
    alone, found = (logged(tmp_path / where, where, **options)[0] for where in ("auto 1", place))
    for student in NAMES:
        assert found[student] == pytest.approx(alone[student], rel=1e-6)
        assert len(found[student]) == 6


def test_exact_norms_have_the_same_bits(tmp_path: Path) -> None:
    alone, together = (logged(tmp_path / f"{n}", f"ddp {n} exact 4")[0] for n in (1, 2))
    assert alone == together
    assert all(len(values) == 6 for values in alone.values())


@pytest.mark.slow
def test_gradients_that_are_never_averaged_have_no_norm(tmp_path: Path) -> None:
    assert logged(tmp_path / "local", "local_sgd 2")[0] == {name: [] for name in NAMES}
