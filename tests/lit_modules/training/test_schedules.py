"""Schedules by step and by epoch have the rates of torch's own, of teacher and students, and resumed at any step."""

import math
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    CyclicLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from apprentice.errors import BadInput
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.distillation import Distillation
from lit_modules.nets.specs import rebuild, to_plain
from lit_modules.objectives import CrossEntropy, Hinton
from lit_modules.schedules import CosineWarmup, Length, build_scheduler, follows_length, nominal
from lit_modules.training.loop import Loop
from tests.callbacks import Notes, SaveAndStop
from tests.grids import mostly_slow
from tests.training import assert_same, digits, distil, fit, net, trainer, weights

Make = Callable[..., LRScheduler]
sgd = partial(SGD, lr=0.1, momentum=0.9)
EPOCHS, BATCHES = 4, 3
STEPS = EPOCHS * BATCHES


def warm(optimizer: Optimizer, steps: int, total: int, **cosine: Any) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.01, total_iters=steps), CosineAnnealingLR(optimizer, total - steps, **cosine)]
    return SequentialLR(optimizer, parts, [steps])


def chain(optimizer: Optimizer) -> LRScheduler:
    return ChainedScheduler([LinearLR(optimizer, 0.5, total_iters=2), ExponentialLR(optimizer, 0.9)], optimizer)


def cycles(optimizer: Optimizer) -> LRScheduler:
    parts = [OneCycleLR(optimizer, 0.2, total_steps=5), OneCycleLR(optimizer, 0.1, total_steps=7)]
    return SequentialLR(optimizer, parts, [5])


CYCLES = partial(CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2)
# What a user chooses, the same by torch's classes with all numbers by hand, and how many steps it counts as one.
SCHEDULES: dict[str, tuple[Make, Callable[[Optimizer], LRScheduler], int]] = {
    "one cycle": (partial(OneCycleLR, max_lr=0.2), partial(OneCycleLR, max_lr=0.2, total_steps=STEPS), 1),
    "one cycle of epochs": (
        partial(OneCycleLR, max_lr=0.2, epochs=4), partial(OneCycleLR, max_lr=0.2, epochs=4, steps_per_epoch=3), 1
    ),
    "cosine": (partial(CosineWarmup), partial(CosineAnnealingLR, T_max=STEPS), 1),
    "warm-up of epochs": (partial(CosineWarmup, warmup_epochs=1.5), partial(warm, steps=4, total=STEPS), 1),
    "warm-up of a share": (partial(CosineWarmup, warmup_ratio=1 / 3), partial(warm, steps=4, total=STEPS), 1),
    "warm-up of steps": (
        partial(CosineWarmup, warmup_steps=5, eta_min=0.01), partial(warm, steps=5, total=STEPS, eta_min=0.01), 1
    ),
    "a sequence of epochs": (
        partial(SequentialLR, schedulers=[
            partial(LinearLR, start_factor=0.01, total_iters=1), partial(CosineAnnealingLR, T_max=3)
        ], milestones=[1]),
        partial(warm, steps=1, total=EPOCHS), BATCHES,
    ),
    "a sequence of steps": (
        partial(SequentialLR, schedulers=[partial(OneCycleLR, max_lr=0.2), partial(OneCycleLR, max_lr=0.1)],
                milestones=[5]),
        cycles, 1,
    ),
    "a chain": (
        partial(ChainedScheduler, schedulers=[
            partial(LinearLR, start_factor=0.5, total_iters=2), partial(ExponentialLR, gamma=0.9)
        ]),
        chain, BATCHES,
    ),
    "cycles": (CYCLES, CYCLES, 1),
    "steps of epochs": (partial(StepLR, step_size=1, gamma=0.5), partial(StepLR, step_size=1, gamma=0.5), BATCHES),
}  # fmt: skip
LRS = {LitClassifier: (0.1,), Distillation: (0.1, 0.3)}


def rates_of(optimizer: Optimizer) -> list[float]:
    return [group[name] for group in optimizer.param_groups for name in ("lr", "momentum")]


def rates(folder: Path) -> Notes:
    return Notes(folder / "rates", lambda trainer, _: rates_of(trainer.optimizers[0]), "on_before_optimizer_step")


def by_hand(make: Callable[[Optimizer], LRScheduler], every: int, lrs: tuple[float, ...] = (0.1,)) -> list[list[float]]:
    optimizer = sgd([{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs])
    scheduler, seen = make(optimizer), list[list[float]]()
    for step in range(1, STEPS + 1):
        seen.append(rates_of(optimizer))
        optimizer.step()
        if not step % every and step < STEPS:
            scheduler.step()
    return seen


def made(module: type, scheduler: Make) -> Loop:
    if module is LitClassifier:
        return LitClassifier(net(), optimizer=sgd, scheduler=scheduler)
    options: Any = {"optimizer": sgd, "scheduler": scheduler, "optimizer_options": {"kd": {"lr": 0.3}}}
    return distil({"ce": CrossEntropy(), "kd": Hinton()}, **options)


CASES = [*zip(SCHEDULES, cycle((Distillation, LitClassifier)), strict=False)]


@pytest.mark.parametrize(("name", "module"), mostly_slow(CASES, CASES[0], CASES[3], CASES[6]))
def test_rates_are_torchs_own_and_a_resumed_fit_has_them(name: str, module: type, tmp_path: Path) -> None:
    make, expected, every = SCHEDULES[name]
    path, whole, resumed = tmp_path / "half.ckpt", made(module, make), made(module, make)
    notes = rates(tmp_path)
    fit(whole, digits(), max_epochs=EPOCHS, callbacks=[notes, SaveAndStop(path, 7, stop=False)])
    seen = by_hand(expected, every, LRS[module])
    assert len({*map(tuple, seen)}) > 2
    for step, by_torch in zip(notes.of_ranks()[0], seen, strict=True):
        assert step == pytest.approx(by_torch, rel=1e-12, abs=1e-15)
    (tmp_path / "again").mkdir()
    again = rates(tmp_path / "again")
    with quiet():
        trainer(max_epochs=EPOCHS, callbacks=[again]).fit(resumed, digits(), ckpt_path=path, weights_only=True)
    assert again.of_ranks()[0] == notes.of_ranks()[0][7:]
    assert_same(weights(whole), weights(resumed))


@pytest.mark.parametrize("module", LRS)
def test_accumulated_batches_are_one_step(module: type, tmp_path: Path) -> None:
    notes = rates(tmp_path)
    options: Any = {"max_epochs": 6, "accumulate_grad_batches": 2, "callbacks": [notes]}
    fit(made(module, SCHEDULES["one cycle"][0]), digits(), **options)
    assert notes.of_ranks()[0] == by_hand(SCHEDULES["one cycle"][1], 1, LRS[module])


def test_after_its_end_the_rate_stays() -> None:
    optimizer = sgd([nn.Parameter(torch.zeros(1))])
    scheduler = CosineWarmup(optimizer, eta_min=0.02, total_steps=3)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.02]


@pytest.mark.parametrize(("make", "line"), [
    (partial(CosineWarmup, warmup_epochs=4), "warmup_epochs 4: expected a warm-up of 0 or more, shorter than"),
    (partial(CosineWarmup, warmup_steps=-1), "warmup_steps -1: expected a warm-up of 0 or more"),
    (partial(CosineWarmup, warmup_steps=1, warmup_epochs=1), "warmup_steps 1: expected either this or warmup_epochs"),
    (partial(CosineWarmup, warmup_ratio=1.0), "warmup_ratio 1.0: expected a warm-up of 0 or more, shorter"),
    (partial(CosineWarmup, start_factor=0), "start_factor 0: expected a factor of the rate, above 0 and at most 1"),
    (partial(SequentialLR, schedulers=[partial(LinearLR), partial(CosineWarmup)], milestones=[2]),
     "schedulers LinearLR and CosineWarmup: expected schedulers that all count epochs, or all steps"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(make: Make, line: str) -> None:
    with pytest.raises(BadInput, match=f"^{line}"):
        build_scheduler(make, sgd([nn.Parameter(torch.zeros(1))]), Length(12, 3))


def test_a_training_without_an_end_has_no_such_schedule() -> None:
    with pytest.raises(BadInput, match=r"^total_steps None: expected a training with a number of epochs"):
        build_scheduler(partial(CosineWarmup), sgd([nn.Parameter(torch.zeros(1))]), Length(math.inf, 3))


def test_schedules_that_follow_the_length_of_training_are_known() -> None:
    expected = dict.fromkeys(("a sequence of epochs", "a chain", "cycles", "steps of epochs"), False)
    assert {name: follows_length(make) for name, (make, *_) in SCHEDULES.items()} == dict.fromkeys(
        SCHEDULES, True
    ) | expected
    assert not any(map(follows_length, (None, SCHEDULES["one cycle"][1], partial(CosineWarmup, total_steps=8))))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_rebuilt_from_plain_data(name: str) -> None:
    """As a checkpoint holds it."""
    again = rebuild(to_plain(SCHEDULES[name][0]), "scheduler")
    optimizers = [sgd([nn.Parameter(torch.zeros(1))]) for _ in range(2)]
    for make, optimizer in zip((SCHEDULES[name][0], again), optimizers, strict=True):
        build_scheduler(make, optimizer, nominal())[0]
    assert rates_of(optimizers[0]) == rates_of(optimizers[1])


def test_a_warm_up_of_epochs_has_the_trainings_steps_under_a_total_of_ones_own() -> None:
    scheduler: Any = build_scheduler(
        partial(CosineWarmup, total_steps=20, warmup_epochs=2), sgd([nn.Parameter(torch.zeros(1))]), Length(12, 3)
    )[0]
    assert (scheduler.total_steps, scheduler.warmup) == (20, 6)


def test_a_schedule_that_ends_before_the_training_is_refused() -> None:
    for make in (CosineWarmup, partial(OneCycleLR, max_lr=0.2)):
        module = made(LitClassifier, partial(make, total_steps=5))
        with pytest.raises(BadInput, match=r"^scheduler.total_steps 5: expected at least 12, the optimizer's steps"):
            module.optimization.check(module, 12, 3)
