"""Each run's best epoch and its early stopping: alone as in company, resumed, on any number of processes."""

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
from lit_modules.objectives import CrossEntropy, Hinton
from lit_modules.run_callbacks import BestEpoch, StopRuns, best_weights
from tests.callbacks import SaveAndStop, StopAt
from tests.grids import mostly_slow
from tests.training import assert_same, classifier, digits, distil, fit, on, trainer, weights

EPOCHS = 6
OBJECTIVES = {"ce": CrossEntropy, "kd": Hinton}
RATES = {"ce": 0.1, "kd": 3.0}  # the second is too large: its validation soon gets worse
sgd = partial(SGD, lr=0.1)


def data() -> Any:
    return digits(validation_size=40)


def made(*names: str) -> Distillation:
    options: Any = {"optimizer": sgd, "optimizer_options": {name: {"lr": RATES[name]} for name in names}}
    return distil({name: OBJECTIVES[name]() for name in names}, **options)


class EachEpoch(Callback):
    """Keeps the weights after each epoch."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.weights.append(weights(pl_module))


def of(run: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in state.items() if name.startswith(f"students.{run}.")}


@pytest.mark.parametrize(("monitor", "best"), [("val/acc", max), ("val/loss", min)])
def test_the_best_epoch_is_the_earliest_best_of_each_run(monitor: str, best: Any) -> None:
    kept, epochs, module = BestEpoch(monitor), EachEpoch(), made("ce", "kd")
    fit(module, data(), max_epochs=EPOCHS, callbacks=[kept, epochs])
    for run in OBJECTIVES:
        values = [epoch[f"{run}/{monitor}"] for epoch in module.training_log.epochs if f"{run}/{monitor}" in epoch]
        place = values.index(best(value for value in values if value == value))
        assert (kept.best[run]["epoch"], kept.best[run]["value"]) == (place + 1, values[place])
        assert_same(kept.best[run]["weights"], of(run, epochs.weights[place]))
    assert best_weights(kept.best, ["kd"]).keys() == of("kd", weights(module)).keys()


def test_a_module_of_one_run_has_a_best_epoch() -> None:
    kept, epochs, module = BestEpoch("val/acc"), EachEpoch(), classifier()
    fit(module, data(), max_epochs=3, callbacks=[kept, epochs])
    assert_same(kept.best[""]["weights"], epochs.weights[int(kept.best[""]["epoch"]) - 1])


def stopped(*names: str, place: str = "auto 1", **options: Any) -> tuple[Distillation, StopRuns]:
    stop = StopRuns("val/loss", patience=1)
    module: Any = fit(made(*names), data(), max_epochs=EPOCHS, callbacks=[stop], **on(place), **options)
    return module, stop


def test_a_run_stops_by_itself_and_alone_as_in_company() -> None:
    together, _ = stopped("ce", "kd")
    alone, _ = stopped("kd")
    assert together.stopped.keys() == {"kd"} == alone.stopped.keys()
    assert together.stopped == alone.stopped
    assert 1 < alone.stopped["kd"]["epochs"] < EPOCHS
    assert_same(of("kd", weights(together)), of("kd", weights(alone)))
    only = fit(made("ce"), data(), max_epochs=EPOCHS)
    assert_same(of("ce", weights(together)), of("ce", weights(only)))
    ran = [sorted(name for name in epoch if name.endswith("val/loss")) for epoch in together.training_log.epochs]
    epochs = int(alone.stopped["kd"]["epochs"])
    assert ran == [["ce/val/loss", "kd/val/loss"]] * epochs + [["ce/val/loss"]] * (EPOCHS - epochs)
    assert len(alone.training_log.epochs) == epochs


def test_a_stopped_run_is_not_computed() -> None:
    module, calls = made("ce", "kd"), []
    module.students["kd"].register_forward_hook(lambda *_: calls.append(module.trainer.current_epoch))
    fit(module, data(), max_epochs=EPOCHS, callbacks=[StopRuns("val/loss", patience=1)])
    assert max(calls) + 1 == module.stopped["kd"]["epochs"]
    with quiet():
        tested = trainer().test(module, data(), verbose=False)[0]
    assert {"ce/test/acc", "kd/test/acc"} <= tested.keys()


def test_patience_counts_validations_without_a_better_one() -> None:
    stop, module = StopRuns("val/loss", patience=2), made("kd")
    fit(module, data(), max_epochs=EPOCHS, callbacks=[stop])
    values = [epoch["kd/val/loss"] for epoch in module.training_log.epochs]
    best = values.index(min(value for value in values if value == value))
    assert not module.stopped or module.stopped["kd"]["epochs"] == best + 3


@pytest.mark.parametrize("step", [4, 7, 13])
def test_a_resumed_fit_makes_the_same_choices(step: int, tmp_path: Path) -> None:
    def callbacks() -> list[Any]:
        return [BestEpoch("val/acc"), StopRuns("val/loss", patience=1)]

    path, whole, resumed = tmp_path / "half.ckpt", made("ce", "kd"), made("ce", "kd")
    first, second = callbacks(), callbacks()
    fit(whole, data(), max_epochs=EPOCHS, callbacks=[*first, SaveAndStop(path, step, stop=False)])
    with quiet():
        trainer(max_epochs=EPOCHS, callbacks=second).fit(resumed, data(), ckpt_path=path, weights_only=True)
    assert_same(weights(whole), weights(resumed))
    assert resumed.stopped == whole.stopped
    assert resumed.training_log.epochs == whole.training_log.epochs
    assert second[1].best == first[1].best
    for run in OBJECTIVES:
        assert_same(second[0].best[run].pop("weights"), first[0].best[run].pop("weights"))
    assert second[0].best == first[0].best


@pytest.mark.parametrize(
    "place", mostly_slow(["ddp 2 exact 3", "ddp_zero1 2", "fsdp 2", "pipeline 2"], "ddp 2 exact 3")
)
def test_ranks_choose_as_one_process_does(place: str, tmp_path: Path) -> None:
    exact = "exact" in place
    options: Any = {} if exact else {"precision": "64-true"}
    found = []
    for where in ("ddp 1 exact 3" if exact else "auto 1", place):
        kept, path = BestEpoch("val/acc"), tmp_path / f"{len(found)}.ckpt"
        stop = StopRuns("val/loss", patience=1)
        callbacks = [kept, stop, SaveAndStop(path, 12, stop=False)]
        module: Any = fit(made("ce", "kd"), data(), max_epochs=EPOCHS, callbacks=callbacks, **on(where), **options)
        state = torch.load(path, weights_only=True)
        found.append((weights(module), best_weights(state["callbacks"]["BestEpoch"]["best"], ["ce", "kd"]), state))
    for one, other in zip(found[0][:2], found[1][:2], strict=True):
        assert_same(one, other, atol=0.0 if exact else 1e-9)
    assert found[0][2]["learner"]["stopped"] == found[1][2]["learner"]["stopped"] != {}


def test_a_score_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match=r"^monitor val/f1: expected a score of the validation: val/loss, val/acc$"):
        fit(made("ce"), data(), callbacks=[BestEpoch("val/f1")])


def test_a_first_validation_that_is_no_number_is_no_best() -> None:
    stop, module = StopRuns("val/loss", patience=2), made("kd")
    stop.best = {"kd": {"value": float("nan"), "waited": 1}}
    assert [*stop.improved(module, {"kd": 5.0})] == ["kd"]
    assert [*stop.improved(module, {"kd": float("nan")})] == []


def test_means_of_an_epoch_leave_out_a_run_that_stopped_within_it() -> None:
    """Its sums are of fewer rows; those of whole epochs before, and of others, are as without a stop."""
    module: Any = fit(made("ce", "kd"), data(), max_epochs=3, callbacks=[StopAt("kd", 4)])
    whole: Any = fit(made("ce", "kd"), data(), max_epochs=3)
    for number, (epoch, expected) in enumerate(zip(module.training_log.epochs, whole.training_log.epochs, strict=True)):
        left = {name: x for name, x in expected.items() if not (number and name.startswith("kd/"))}
        assert epoch == pytest.approx(left, nan_ok=True)
    assert module.stopped["kd"]["epochs"] == pytest.approx(4 / 3, abs=1e-3)


def test_without_a_run_training_ends_after_its_last_step() -> None:
    module: Any = fit(made("kd"), data(), max_epochs=3, callbacks=[StopAt("kd", 4)])
    short: Any = fit(made("kd"), data(), max_steps=4, max_epochs=3)
    assert_same(weights(module), weights(short))
    assert (module.batches_done, module.global_step) == (4, 4)
