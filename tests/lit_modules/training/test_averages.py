"""Moving averages of students' weights: the formula, beside weights that they do not change, resumed, on many ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD

from apprentice.errors import BadInput
from harness.runs.quiet import quiet
from lit_modules.distillation import Distillation
from lit_modules.nets import ResNet
from lit_modules.objectives import CrossEntropy, Hinton
from lit_modules.run_callbacks import StopRuns
from lit_modules.training.averages import average_weights
from tests.callbacks import SaveAndStop
from tests.grids import mostly_slow
from tests.training import SHAPE, assert_same, digits, distil, fit, near_ties, net, on, trainer, weights

DECAY = 0.8
State = dict[str, torch.Tensor]


def data() -> Any:
    return digits(validation_size=40)


def made(ema: float | None = DECAY, *names: str, make: Any = None) -> Distillation:
    options: Any = {"optimizer": partial(SGD, lr=0.1), "ema": ema}
    if make is not None:
        students = {name: (make(), CrossEntropy()) for name in names}
        return Distillation(net(), students, SHAPE, **options)
    objectives = {"ce": CrossEntropy, "kd": Hinton}
    return distil({name: objectives[name]() for name in names or objectives}, **options)


class EachStep(Callback):
    """Keeps a net's state after each step of the optimizer."""

    def __init__(self, run: str) -> None:
        self.run, self.states, self.steps = run, list[State](), 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.states.append(weights(pl_module.net_of(self.run)))


def averages(module: Distillation, run: str) -> State:
    return weights(module.average_of(run))  # type: ignore[arg-type]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [None, partial(net, ResNet, depth=8)], ids=["plain", "BatchNorm"])
def test_an_average_is_that_of_the_formula(make: Any, accumulate: int) -> None:
    """In float64, of weights and of BatchNorm's running statistics."""
    module, kept = made(DECAY, "ce", make=make), EachStep("ce")
    fit(module, data(), max_epochs=3, callbacks=[kept], accumulate_grad_batches=accumulate)
    first, *others = kept.states
    assert len(others) + 1 == (9 if accumulate == 1 else 6)
    for name, value in averages(module, "ce").items():
        expected = first[name].double()
        for state in others:
            expected = DECAY * expected + (1 - DECAY) * state[name].double()
        if value.is_floating_point():
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
    assert any("running_mean" in name for name in first) == (make is not None)


def test_the_weights_do_not_change_and_stay_those_that_are_trained() -> None:
    with_averages, without = (fit(made(ema), data(), max_epochs=2) for ema in (DECAY, None))
    state = weights(without)
    assert_same({name: x for name, x in weights(with_averages).items() if name in state}, state)
    assert not any(p.requires_grad for p in with_averages.averages.parameters())  # type: ignore[union-attr]


def test_both_are_validated_and_tested() -> None:
    module: Any = fit(made(DECAY), data(), max_epochs=2)
    with quiet():
        tested = trainer().test(module, data(), verbose=False)[0]
    split = data().samples("test", torch.arange(100))
    for run in ("ce", "kd"):
        for key, judged in {"acc": module.net_of(run), "ema_acc": module.average_of(run)}.items():
            logits = judged.eval()(split.inputs)
            right = int((logits.argmax(1) == split.labels).sum())
            assert 100 * tested[f"{run}/test/{key}"] == pytest.approx(right, abs=1e-3 + near_ties(logits))
        assert {f"{run}/val/acc", f"{run}/val/ema_acc", f"{run}/val/ema_loss"} <= module.training_log.epochs[-1].keys()


def test_a_resumed_fit_has_the_same_averages(tmp_path: Path) -> None:
    path, whole, resumed = tmp_path / "half.ckpt", made(), made()
    fit(whole, data(), max_epochs=3, callbacks=[SaveAndStop(path, 5, stop=False)])
    with quiet():
        trainer(max_epochs=3).fit(resumed, data(), ckpt_path=path, weights_only=True)
    assert_same(weights(whole), weights(resumed))
    assert any(name.startswith("averages.kd.") for name in weights(whole))


def test_of_a_student_that_has_stopped_nothing_is_averaged() -> None:
    stop = StopRuns("val/loss", patience=1)
    stop.best = {"kd": {"value": -1.0, "waited": 0}}  # it never gets better
    module, alone = made(), made(DECAY, "kd")
    fit(module, data(), max_epochs=3, callbacks=[stop])
    fit(alone, data(), max_epochs=1)
    assert module.stopped["kd"]["epochs"] == 1
    assert_same(averages(module, "kd"), averages(alone, "kd"))


@pytest.mark.parametrize("place", mostly_slow(["ddp 2 exact 3", "ddp_zero1 2", "fsdp 2"], "ddp 2 exact 3"))
def test_ranks_have_the_same_averages(place: str) -> None:
    options: Any = {} if "exact" in place else {"precision": "64-true"}
    where = "ddp 1 exact 3" if "exact" in place else "auto 1"
    one, other = (fit(made(), data(), **on(spot), **options) for spot in (where, place))
    assert_same(weights(one), weights(other), atol=0.0 if "exact" in place else 1e-9)
    for epoch, again in zip(one.training_log.epochs, other.training_log.epochs, strict=True):  # type: ignore[arg-type]
        assert epoch == (again if "exact" in place else pytest.approx(again))


@pytest.mark.parametrize("decay", [0, 1, -0.5])
def test_a_decay_that_is_none_is_refused(decay: float) -> None:
    with pytest.raises(BadInput, match=r"^ema .*: expected a decay between 0 and 1, such as 0.999$"):
        made(decay)


def test_whole_numbers_are_the_nets_own() -> None:
    """Such as places in a table, which averaging would round to others."""
    table = torch.nn.Module()
    table.register_buffer("places", torch.arange(512))
    averaged = average_weights(table, 0.9999)
    for _ in range(3):
        averaged.update_parameters(table)
    assert_same({"places": averaged.module.places}, {"places": table.places})  # type: ignore[dict-item]
