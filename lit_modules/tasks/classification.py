"""One label a sample: the class that it belongs to."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

import numpy as np
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from apprentice.batch import HIDDEN, IGNORED
from apprentice.errors import BadInput
from lit_modules.nets.specs import rebuild
from lit_modules.objectives.base import cross_entropy, widen
from lit_modules.tasks.base import Metric, Range, Task, check_classes
from lit_modules.tasks.own_metric import OwnMetric
from lit_modules.tasks.scores import ExactMean, Gathered, Scored, Scores

TOP = 5
BINS = 15  # of confidence, as in Guo et al., "On Calibration of Modern Neural Networks", 2017
ClassMetric = Literal["accuracy", "balanced_accuracy", "top5", "f1"]
Judge = ClassMetric | OwnMetric

ACCURACY = Metric(
    name="test_acc", tested=("test_acc", "test_correct"), columns={"test_acc": "test accuracy, %"},
    word="accuracy", title="test accuracy, %", chart="validation accuracy", unit="points", higher_is_better=True,
    scale=100.0, digits=2, counted="samples", limits=(0.0, 100.0), of_samples="test_right",
)  # fmt: skip


def _metric(score: str, word: str) -> Metric:
    """A metric beside the accuracy, which is no mean over samples."""
    name, title = f"test_{score}", f"test {word}, %"
    return replace(
        ACCURACY, name=name, tested=(name, *ACCURACY.tested), columns={name: title}, word=word, title=title,
        chart=f"validation {word}", of_samples=None,
    )  # fmt: skip


class Classification(Task):
    """Samples with one class each; nets give logits (b, classes).

    Args:
        num_classes: number of logits.
        metric: what nets are judged by, beside the accuracy: see `ClassScores`; top5 is of more than five classes.

    Raises:
        BadInput: a metric of the user's own fails, or gives other than one finite number.
    """

    metrics: ClassVar[Mapping[str, Metric]] = MappingProxyType(
        {
            "accuracy": ACCURACY,
            "balanced_accuracy": _metric("balanced_accuracy", "balanced accuracy"),
            "top5": _metric("top5", "top-5 accuracy"),
            "f1": _metric("f1", "F1 score"),
        }
    )

    def __init__(self, num_classes: int, metric: Judge = "accuracy") -> None:
        super().__init__()
        metric = rebuild(metric, "metric")
        if isinstance(metric, str) and metric not in self.metrics:
            raise BadInput("metric", metric, f"one of {', '.join(self.metrics)}, by which classes are judged")
        self.num_classes, self.scored = num_classes, metric
        if isinstance(metric, OwnMetric):
            metric.check(num_classes)
            self.metric = metric.describe()
            return
        self.metric = self.metrics[metric]
        if metric == "top5" and num_classes <= TOP:
            expected = f"another metric: of {num_classes} classes the label is always among the first {TOP}"
            raise BadInput("metric", metric, expected)

    @classmethod
    def of_data(cls, data: Any, metric: str | OwnMetric | None = None) -> "Classification":
        return cls(data.num_classes, cast("Judge", metric or "accuracy"))

    def scores(self) -> "ClassScores":
        return ClassScores(self.num_classes, self.scored)

    def check_labels(self, labels: Range, classes: int, weighted: bool, training: bool) -> None:
        """Raise BadInput if labels are no classes; hidden ones are where a batch says so."""
        if labels.ignored:
            labels = labels._replace(low=IGNORED)
        check_classes(labels, HIDDEN if weighted else 0, classes)

    def keep_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Of each sample whether it is right, its predicted class and its label."""
        predicted, labels = (values[name].astype(np.int64) for name in ("predicted", "label"))
        return {"right": values["right"] != 0, "predicted": predicted, "labels": labels}

    def average_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {"ece": calibration_error(values["confidence"], values["right"]), **super().average_samples(values)}


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error: over bins of confidence the mean distance of confidence and accuracy (n,)."""
    bins = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    gaps = [abs(float((confidence - right)[bins == b].sum())) for b in range(BINS)]
    return sum(gaps) / len(right)


class ClassScores(Scores):
    """Scores of a classifier: loss, accuracy, and the confusion matrix (classes, classes) with the truth in rows.

    Args:
        num_classes: number of logits.
        metric: scored beside the accuracy, under its own name: `balanced_accuracy` is the mean over classes of the
            recall, of those that some sample has; `f1` the mean of the F1 scores, of those that some sample has or is
            taken for; `top5` the share of samples whose label is among the five largest logits. One of the user's own
            gets all logits and labels.
    """

    names: tuple[str, ...] = ("acc", "correct")
    trained = ("acc",)
    sampled = ("right", "predicted", "confidence", "label")

    def __init__(self, num_classes: int, metric: Judge = "accuracy") -> None:
        super().__init__()
        self.metric = metric
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        self.loss = ExactMean()
        self.score = metric.describe().score if isinstance(metric, OwnMetric) else metric
        if metric != "accuracy":
            self.names = (self.score, *self.names)
        if isinstance(metric, OwnMetric):
            self.gathered = Gathered("logits", "labels")
        if metric == "top5":
            self.hits = ExactMean()

    def update(self, logits: Scored, labels: Tensor) -> None:
        assert isinstance(logits, Tensor)
        self.confusion.update(logits, labels)
        self.loss.update(cross_entropy(logits, labels))
        if self.metric == "top5":
            self.hits.update((logits.topk(TOP).indices == labels[:, None]).any(1))
        if isinstance(self.metric, OwnMetric):
            self.gathered.update(self.index, logits=logits, labels=labels)

    def compute(self) -> dict[str, Tensor]:
        """{"loss", "acc", "correct"} and the metric over all ranks, float64."""
        confusion = self.confusion.compute().double()
        correct = confusion.trace()
        values = {"loss": self.loss.compute(), "acc": correct / confusion.sum(), "correct": correct}
        return values if self.metric == "accuracy" else {self.score: self._metric(confusion), **values}

    def _metric(self, confusion: Tensor) -> Tensor:
        if isinstance(self.metric, OwnMetric):
            gathered = self.gathered.compute()
            return self.metric(gathered["logits"], gathered["labels"][:, 0].long())
        if self.metric == "top5":
            return self.hits.compute()
        right, labelled, taken = confusion.diag(), confusion.sum(1), confusion.sum(0)  # (classes,)
        ratios = {"balanced_accuracy": (right, labelled), "f1": (2 * right, labelled + taken)}
        share, whole = ratios[self.score]
        return (share / whole)[whole > 0].mean()

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {"acc": logits.detach().argmax(1) == labels}

    def of_sample(self, logits: Scored, labels: Tensor) -> dict[str, Tensor]:
        assert isinstance(logits, Tensor)
        predicted, confidence = logits.argmax(1), widen(logits).softmax(1).amax(1)
        return {"right": predicted == labels, "predicted": predicted, "confidence": confidence, "label": labels}

    def confusion_matrix(self) -> Tensor:
        return self.confusion.compute().cpu()
