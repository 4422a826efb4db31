"""What optimizers take; gradient norms are those of the global batch, on any number of devices."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.optim import SGD, Muon
from torch.optim.lr_scheduler import OneCycleLR

from apprentice.errors import BadInput
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.objectives import CrossEntropy
from tests.callbacks import Notes
from tests.grids import mostly_slow
from tests.training import SHAPE, LinesLogger, assert_same, digits, distillation, fit, net, on, weights
from tests.training import digits as data

sgd = partial(SGD, lr=0.1, momentum=0.9)


def test_a_cycle_that_ends_too_early_is_refused() -> None:
    module = LitClassifier(net(), optimizer=sgd, scheduler=partial(OneCycleLR, max_lr=0.1, total_steps=5))
    with pytest.raises(BadInput, match=r"^scheduler.total_steps 5: expected at least 6, the optimizer's steps"):
        fit(module, digits())


def matrices() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=False), nn.ReLU(), nn.Linear(16, 10, bias=False))


def test_muon_trains_a_net_of_matrices() -> None:
    module = fit(LitClassifier(matrices(), optimizer=partial(Muon, lr=0.02)), digits(), max_epochs=3)
    assert module.training_log.epochs[-1]["train/loss"] < module.training_log.epochs[0]["train/loss"]  # type: ignore[union-attr, index]


def test_it_names_the_first_parameter_that_it_does_not_take() -> None:
    muon = partial(Muon, lr=0.02)
    expected = r"^optimizer Muon: expected one that takes {} \(16, 1, 3, 3\); it says: Muon only supports 2D"
    with pytest.raises(BadInput, match=expected.format("net.features.0.weight")):
        fit(LitClassifier(net(), optimizer=muon), digits())
    students: Any = {"a": (matrices(), CrossEntropy()), "b": (net(), CrossEntropy())}
    with pytest.raises(BadInput, match=expected.format("students.b.net.features.0.weight")):
        fit(Distillation(net(), students, input_shape=SHAPE, optimizer=muon), digits())


TAG = "{}/train/grad_2.0_norm_total"
NAMES = ("ce", "cosine")


def norms(_trainer: Any, module: Any) -> dict[str, float]:
    """Those of the students before the module's own hook computes them."""
    gradients = {name: [p.grad.flatten().double() for p in module.students[name].parameters()] for name in NAMES}
    return {name: float(torch.cat(parts).norm()) for name, parts in gradients.items()}


def logged(path: Path, place: str = "auto 1", **kwargs: Any) -> tuple[dict[str, list[float]], LightningModule]:
    logger = LinesLogger(path)
    options = {"logger": logger, "log_every_n_steps": 1, "gradient_clip_val": 0.01} | kwargs
    module = fit(distillation([*NAMES]), data(), **on(place), **options)
    return {name: logger.values(TAG.format(name)) for name in NAMES}, module


def test_norms_are_those_before_clipping_and_move_no_bit(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "norms", norms, "on_before_optimizer_step")
    found, module = logged(tmp_path / "log", callbacks=[notes])
    for name in NAMES:
        assert found[name] == pytest.approx([step[name] for step in notes.of_ranks()[0]], rel=1e-6)
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
