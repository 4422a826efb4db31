"""A task is one class with its scores; what classifiers are judged by beside the accuracy."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, top_k_accuracy_score
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_f1_score, multiclass_recall

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from datamodules import Digits
from experiments import kd
from harness.reports.samples import unpack_classes
from harness.runs.quiet import quiet
from lit_modules import nets, tasks
from lit_modules.classifier import LitClassifier
from lit_modules.tasks import (
    ACCURACY,
    Classification,
    ClassMetric,
    ClassScores,
    ExactMean,
    Metric,
    Scores,
    known_metrics,
)
from tests.commands import results
from tests.grids import mostly_slow
from tests.training import digits, net, trainer

DISTANCE = replace(
    ACCURACY, name="test_distance", tested=("test_distance",), columns={"test_distance": "test distance"},
    word="distance", unit="grades", higher_is_better=False, scale=1.0, of_samples="test_far",
)  # fmt: skip


class Distances(Scores):
    names = ("distance", "loss")
    trained = ("distance",)
    sampled = ("far", "predicted", "label")

    def __init__(self) -> None:
        super().__init__()
        self.distance, self.loss = ExactMean(), ExactMean()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        self.distance.update(self.of_sample(logits, labels)["far"])
        self.loss.update(F.cross_entropy(logits, labels, reduction="none"))

    def compute(self) -> dict[str, Tensor]:
        return {"distance": self.distance.compute(), "loss": self.loss.compute()}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {"distance": self.of_sample(logits.detach(), labels)["far"]}

    def of_sample(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = logits.argmax(1)
        return {"far": (predicted - labels).abs(), "predicted": predicted, "label": labels}


class Grades(Classification):
    """Classes in an order: a net is as good as its predictions are near."""

    metrics: ClassVar[dict[str, Metric]] = {"accuracy": DISTANCE}

    def scores(self) -> Distances:  # type: ignore[override]
        return Distances()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        grades = torch.arange(logits.shape[-1])
        return (logits.softmax(-1) * (grades - labels[:, None]).abs()).sum(-1)

    def keep_samples(self, values: Any) -> dict[str, Any]:
        predicted, labels = (values[name].astype(np.int64) for name in ("predicted", "label"))
        return {"far": values["far"], "predicted": predicted, "labels": labels}

    def average_samples(self, values: Any) -> dict[str, float]:
        return {}


class GradedDigits(Digits):
    task = "grades"


def test_a_new_task_is_one_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(tasks.TASKS, "grades", f"{__name__}.Grades")
    monkeypatch.setitem(known_metrics(), DISTANCE.name, DISTANCE)
    run = tmp_path / "run"
    flags = ["--data", f"{__name__}.GradedDigits", "--data.train_size", "200", "--teacher", "LightNN", "--only", "ce"]
    kd.main([*flags, "--seeds", "2", "--trainer.max_epochs", "2", "--trainer.logger", "false", "--out", str(run)])
    saved = results(run)
    assert saved["metric"] == {"name": "test_distance", "higher_is_better": False}
    assert "test distance" in (run / "results.md").read_text()
    truth, teacher = unpack_classes(saved["teacher"]["test_labels"]), saved["teacher"]
    for predicted, distance in zip(teacher["test_predicted"], teacher["test_distance"], strict=True):
        assert distance == pytest.approx(np.abs(unpack_classes(predicted) - truth).mean())
    assert all("val/distance" in epoch for epoch in saved["students"]["ce"]["epochs"][0])


class HuggingFaceLM(nets.LightNN):
    pass


def test_a_net_of_any_name_brings_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", "Text", "--teacher", f"{__name__}.HuggingFaceLM", "--student", "GPT"]
    with pytest.raises(SystemExit) as stop:
        kd.main([*flags, "--out", str(tmp_path / "a")])
    assert stop.value.code == 2
    assert "expected a net that takes inputs (64,)" in capsys.readouterr().err


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
def test_two_processes_have_the_scores_of_one(metric: ClassMetric) -> None:
    """In float64: in float32 the rows of a batch may decide between a new net's nearly equal logits."""
    found = []
    for devices in (1, 2):
        module, data = LitClassifier(net(), task=Classification(10, metric)), digits(validation_size=51)
        with quiet():
            (tested,) = trainer(devices, precision="64-true").test(module, data, verbose=False)
            (validated,) = trainer(devices, precision="64-true").validate(module, data, verbose=False)
        found.append({**tested, **validated})
    assert found[0] == pytest.approx(found[1], abs=1e-9)
    assert {f"test/{metric}", f"val/{metric}", "test/acc", "val/acc"} <= set(found[0])


def test_the_first_five_of_five_classes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^metric top5: expected another metric: of 5 classes the label is always"):
        Classification(5, "top5")
    assert Classification(6, "top5").scores().names == ("top5", "acc", "correct")
