"""A metric of the user's own is computed of a whole set, on any number of processes; a checkpoint rebuilds it."""

from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassF1Score
from torchmetrics.functional.classification import multiclass_auroc

from apprentice.errors import BadInput
from harness.runs.quiet import quiet
from lit_modules.nets.specs import rebuild, to_plain
from lit_modules.objectives import CrossEntropy
from lit_modules.tasks import Classification, OwnMetric
from tests.training import digits, distil, fit, on, trainer

F1 = OwnMetric("torchmetrics.classification.MulticlassF1Score", {"num_classes": 10, "average": "weighted"})
AUROC = OwnMetric("torchmetrics.functional.classification.multiclass_auroc", {"num_classes": 10})
ORDERED = OwnMetric("tests.lit_modules.test_own_metric.ordered", {})


def ordered(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """What depends on the order of samples in every bit."""
    return float((logits[:, 0] * torch.arange(1, len(labels) + 1) * (labels + 1)).cumsum(0).sum())


ordered.higher_is_better = False  # type: ignore[attr-defined]


def made(metric: OwnMetric) -> Any:
    return distil({"ce": CrossEntropy()}, task=Classification(10, metric))


@pytest.mark.parametrize("metric", [F1, AUROC], ids=["class", "function"])
def test_it_is_that_of_torchmetrics(metric: OwnMetric) -> None:
    module, data = made(metric), digits(validation_size=40)
    fit(module, data)
    with quiet():
        tested = trainer().test(module, data, verbose=False)[0]
    split = data.samples("test", torch.arange(100))
    with torch.no_grad():
        logits = module.net_of("ce").eval()(split.inputs).double()
    if metric is F1:
        expected = MulticlassF1Score(10, average="weighted")(logits, split.labels)
    else:
        expected = multiclass_auroc(logits, split.labels, 10)
    score = metric.describe().score
    assert tested[f"ce/test/{score}"] == pytest.approx(float(expected), abs=1e-6)
    assert f"ce/val/{score}" in module.training_log.epochs[-1]


def test_ranks_give_the_same_bits() -> None:
    one, other = (fit(made(ORDERED), digits(validation_size=40), **on(f"ddp {n} exact 3")) for n in (1, 2))
    assert one.training_log.epochs == other.training_log.epochs
    assert "ce/val/ordered" in one.training_log.epochs[-1]  # type: ignore[operator, index]


def test_a_task_with_it_is_rebuilt_from_plain_data() -> None:
    task = rebuild(to_plain(Classification(10, F1)), "task")
    assert (task.scored.path, task.scored.arguments) == (F1.path, F1.arguments)
    assert task.metric == F1.describe()


def test_what_it_says_of_its_direction_is_kept() -> None:
    assert [m.higher_is_better for m in (F1, AUROC, ORDERED)] == [True, None, False]
    wrapper = OwnMetric("torchmetrics.CalibrationError", {"task": "multiclass", "num_classes": 10})
    assert not Classification(10, wrapper).higher_is_better("CalibrationError")
    assert not Classification(10, ORDERED).higher_is_better("ordered")
    assert Classification(10, AUROC).higher_is_better("multiclass_auroc")


def pairs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits


@pytest.mark.parametrize(("path", "line"), [
    ("tests.lit_modules.test_own_metric.pairs", "a metric that gives one finite number; pairs gives shape (12, 3)"),
    ("torchmetrics.MeanSquaredError", "a metric of logits (n, 3) and labels (n,); it says: Predictions and targets"),
])  # fmt: skip
def test_what_is_no_metric_is_refused(path: str, line: str) -> None:
    with pytest.raises(BadInput) as fault:
        Classification(3, OwnMetric(path, {}))
    assert str(fault.value).startswith(f"metric {path}: expected {line}")


def acc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return 0.5


def ema_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return 0.5


@pytest.mark.parametrize("name", ["acc", "ema_loss"])
def test_a_name_that_a_score_has_is_refused(name: str) -> None:
    line = f"a metric of another name: {name} is a score beside it"
    with pytest.raises(BadInput, match=line):
        Classification(3, OwnMetric(f"tests.lit_modules.test_own_metric.{name}", {}))
