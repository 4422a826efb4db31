"""What classifiers are judged by beside the accuracy: sklearn's and torchmetrics' numbers, on any number of ranks."""

from functools import partial
from typing import get_args

import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, top_k_accuracy_score
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score, multiclass_recall

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness.runs.quiet import quiet
from lit_modules.classifier import LitClassifier
from lit_modules.tasks import Classification, ClassMetric, ClassScores
from tests.grids import mostly_slow
from tests.training import digits, net, trainer

CLASSES = 7
OTHERS = [name for name in get_args(ClassMetric) if name != "accuracy"]


def samples(classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Logits (60, 7) that are right more often than not, and labels (60,) of the first `classes`, some of them rare."""
    labels = (torch.rand(60).square() * classes).long()
    return torch.randn(60, CLASSES) + 1.5 * torch.nn.functional.one_hot(labels, CLASSES), labels


def score(metric: ClassMetric, logits: Tensor, labels: Tensor) -> float:
    scores = ClassScores(CLASSES, metric)
    for part in (slice(0, 23), slice(23, None)):
        scores.update(logits[part], labels[part])
    values = scores.compute()
    assert set(values) == {"loss", "acc", "correct", metric}
    assert float(values["acc"]) == (logits.argmax(1) == labels).double().mean()
    return float(values[metric])


@pytest.mark.parametrize("metric", OTHERS)
def test_a_metric_is_sklearns_and_torchmetrics(metric: ClassMetric) -> None:
    logits, labels = with_seed(0, samples)
    guesses = logits.argmax(1)
    theirs = {
        "balanced_accuracy": lambda: balanced_accuracy_score(labels, guesses),
        "f1": lambda: f1_score(labels, guesses, average="macro"),
        "top5": lambda: top_k_accuracy_score(labels, logits, k=5),
    }
    torchs = {
        "balanced_accuracy": partial(multiclass_recall, average="macro"),
        "f1": partial(multiclass_f1_score, average="macro"),
        "top5": partial(multiclass_accuracy, average="micro", top_k=5),
    }
    found = score(metric, logits, labels)
    assert found == pytest.approx(theirs[metric](), abs=1e-14)
    assert found == pytest.approx(float(torchs[metric](logits, labels, CLASSES)), abs=1e-6)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_classes_that_no_sample_has_have_no_recall() -> None:
    logits, labels = with_seed(1, partial(samples, 4))
    guesses = logits.argmax(1)
    assert not set(guesses.tolist()) <= set(labels.tolist())
    expected = balanced_accuracy_score(labels, guesses)
    assert score("balanced_accuracy", logits, labels) == pytest.approx(expected, abs=1e-14)
    assert score("f1", logits, labels) == pytest.approx(f1_score(labels, guesses, average="macro"), abs=1e-14)


@pytest.mark.parametrize("metric", mostly_slow(OTHERS, "f1"))
def test_two_processes_have_the_bits_of_one(metric: ClassMetric) -> None:
    found = []
    for devices in (1, 2):
        module, data = LitClassifier(net(), task=Classification(10, metric)), digits(validation_size=51)
        with quiet():
            (tested,) = trainer(devices).test(module, data, verbose=False)
            (validated,) = trainer(devices).validate(module, data, verbose=False)
        found.append({**tested, **validated})
    assert found[0] == found[1]
    assert {f"test/{metric}", f"val/{metric}", "test/acc", "val/acc"} <= set(found[0])


def test_the_first_five_of_five_classes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^metric top5: expected another metric: of 5 classes the label is always"):
        Classification(5, "top5")
    assert Classification(6, "top5").scores().names == ("top5", "acc", "correct")
