"""Schedulers that count steps are stepped with the optimizer, and an optimizer names the parameter it can't take."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.optim import SGD, Muon
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, StepLR

from apprentice.errors import BadInput
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.objectives import CrossEntropy, Hinton
from tests.callbacks import SaveAndStop
from tests.training import SHAPE, assert_same, digits, fit, net, trainer, weights

Make = Callable[[torch.optim.Optimizer], LRScheduler]
sgd = partial(SGD, lr=0.1, momentum=0.9)


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: torch.optim.Optimizer) -> None:
        group = optimizer.param_groups[0]
        self.seen.append((group["lr"], group["momentum"]))


def by_hand(make: Make, steps: int, every: int = 1) -> list[tuple[float, float]]:
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    scheduler, seen = make(optimizer), list[tuple[float, float]]()
    for step in range(steps):
        seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        if not (step + 1) % every:
            scheduler.step()
    return seen


CYCLES: dict[str, Make] = {
    "one cycle": partial(OneCycleLR, max_lr=0.1, epochs=4, steps_per_epoch=3),
    "cycles": partial(CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2),
}


@pytest.mark.parametrize("module", [LitClassifier, Distillation])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", CYCLES)
def test_a_cycle_counts_the_optimizers_steps(name: str, accumulate: int, module: type) -> None:
    """Of 3 batches an epoch, 2 steps where they are accumulated."""
    options: Any = {"optimizer": sgd, "scheduler": CYCLES[name]}
    students: Any = {"ce": (net(), CrossEntropy()), "kd": (net(), Hinton())}
    made = LitClassifier(net(), **options) if module is LitClassifier else None
    rates, epochs = Rates(), 4 if accumulate == 1 else 6
    made = made or Distillation(net(seed=1), students, input_shape=SHAPE, **options)
    fit(made, digits(), max_epochs=epochs, callbacks=[rates], accumulate_grad_batches=accumulate)
    assert rates.seen == by_hand(CYCLES[name], 12)


def test_others_count_epochs() -> None:
    make, rates = partial(StepLR, step_size=1, gamma=0.5), Rates()
    fit(LitClassifier(net(), optimizer=sgd, scheduler=make), digits(), callbacks=[rates])
    assert rates.seen == by_hand(make, 6, every=3)


def test_a_cycle_is_resumed_in_the_middle(tmp_path: Path) -> None:
    def made() -> LitClassifier:
        return LitClassifier(net(), optimizer=sgd, scheduler=CYCLES["one cycle"])

    path, rates, resumed = tmp_path / "half.ckpt", Rates(), made()
    whole = fit(made(), digits(), max_epochs=4, callbacks=[SaveAndStop(path, 7, stop=False)])
    trainer(max_epochs=4, callbacks=[rates]).fit(resumed, digits(), ckpt_path=path, weights_only=False)
    assert rates.seen == by_hand(CYCLES["one cycle"], 12)[7:]
    assert_same(weights(whole), weights(resumed))


def test_a_cycle_that_ends_too_early_is_refused() -> None:
    module = LitClassifier(net(), optimizer=sgd, scheduler=partial(OneCycleLR, max_lr=0.1, total_steps=5))
    with pytest.raises(BadInput, match=r"^scheduler.total_steps 5: expected at least 6, the optimizer's steps"):
        fit(module, digits())


def matrices() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=False), nn.ReLU(), nn.Linear(16, 10, bias=False))


def test_muon_trains_a_net_of_matrices() -> None:
    module = fit(LitClassifier(matrices(), optimizer=partial(Muon, lr=0.02)), digits(), max_epochs=3)
    assert module.epochs[-1]["train/loss"] < module.epochs[0]["train/loss"]  # type: ignore[union-attr, index]


def test_it_names_the_first_parameter_that_it_does_not_take() -> None:
    muon = partial(Muon, lr=0.02)
    expected = r"^optimizer Muon: expected one that takes {} \(16, 1, 3, 3\); it says: Muon only supports 2D"
    with pytest.raises(BadInput, match=expected.format("net.features.0.weight")):
        fit(LitClassifier(net(), optimizer=muon), digits())
    students: Any = {"a": (matrices(), CrossEntropy()), "b": (net(), CrossEntropy())}
    with pytest.raises(BadInput, match=expected.format("students.b.net.features.0.weight")):
        fit(Distillation(net(), students, input_shape=SHAPE, optimizer=muon), digits())
