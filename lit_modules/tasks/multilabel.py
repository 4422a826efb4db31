"""Several labels a sample, each there or not, of which some may be unknown."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.classification import multilabel_average_precision

from apprentice.batch import Batch
from apprentice.errors import BadInput
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.outputs import LABELS
from lit_modules.tasks.base import Metric, Range, Task
from lit_modules.tasks.scores import ExactMean, Gathered, Scored, Scores

TITLES = {"test_map": "macro AP, %", "test_exact": "exact match, %", "test_label_acc": "labels right, %"}
IGNORE = -1  # an unknown label, for torchmetrics


def _metric(score: str, word: str) -> Metric:
    return Metric(
        name=f"test_{score}", tested=tuple(TITLES), columns=TITLES, word=word, title=f"test {word}, %",
        chart=f"validation {word}", unit="points", higher_is_better=True, scale=100.0, digits=2, counted="samples",
        limits=(0.0, 100.0), of_samples="test_whole" if score == "exact" else None,
    )  # fmt: skip


class MultiLabel(Task):
    """Samples with C labels each, (b, C) floats of 0 and 1, NaN where unknown; nets give logits (b, C).

    The loss of a sample is the mean binary cross-entropy of its known labels, 0 if it has none.

    Args:
        num_classes: number of labels, C.
        metric: what nets are judged by: `map`, the mean over labels of the average precision; `exact`, the share of
            samples of which all known labels are right; `label_acc`, the share of right ones among known labels.
    """

    metrics: ClassVar[Mapping[str, Metric]] = MappingProxyType(
        {
            "map": _metric("map", "macro AP"),
            "exact": _metric("exact", "exact match"),
            "label_acc": _metric("label_acc", "label accuracy"),
        }
    )
    outputs = LABELS
    fidelity = ()

    def __init__(self, num_classes: int, metric: str = "map") -> None:
        super().__init__()
        if metric not in self.metrics:
            raise BadInput("metric", metric, f"{', '.join(self.metrics)}, by which several labels a sample are judged")
        self.num_classes, self.metric = num_classes, self.metrics[metric]

    @classmethod
    def of_data(cls, data: Any, metric: Any = None) -> "MultiLabel":
        return cls(data.num_classes, metric or "map")

    def scores(self) -> "LabelScores":
        return LabelScores()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return (b,), the mean binary cross-entropies of logits (b, C) with the known labels (b, C)."""
        return mean_of_known(label_losses(logits, labels), labels)

    def check_labels(self, labels: Range, classes: int, weighted: bool, training: bool) -> None:
        raise BadInput("data", "labels that are whole numbers", "floats of 0 and 1, NaN where a label is unknown")

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def keep_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"whole": values["whole"] != 0}


def label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return (b, C), binary cross-entropies of logits with labels (b, C), of some value where a label is NaN."""
    z = widen(logits)
    return F.binary_cross_entropy_with_logits(z, labels.nan_to_num().to(z.dtype), reduction="none")


def mean_of_known(values: Tensor, labels: Tensor) -> Tensor:
    """Return (b,), the means of values (b, C) where labels (b, C) are no NaN; 0 where there are none."""
    known = ~labels.isnan()
    return values.where(known, 0.0).sum(1) / known.sum(1).clamp(min=1)


class LabelScores(Scores):
    """Loss, macro average precision, exact match and the share of right labels, of known ones alone."""

    names = ("map", "exact", "label_acc")
    trained = ()
    sampled = ("whole",)

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.exact, self.right = ExactMean(), ExactMean(), ExactMean()
        self.gathered = Gathered("logits", "labels")

    def update(self, logits: Scored, labels: Tensor) -> None:
        assert isinstance(logits, Tensor)
        known = ~labels.isnan()
        self.loss.update(mean_of_known(label_losses(logits, labels), labels))
        self.exact.update(self.of_sample(logits, labels)["whole"][known.any(1)])
        self.right.update(_right(logits, labels)[known].double())
        self.gathered.update(self.index, logits=logits, labels=labels)

    def compute(self) -> dict[str, Tensor]:
        gathered = self.gathered.compute()
        target = gathered["labels"].nan_to_num(IGNORE).long()
        ap = multilabel_average_precision(
            gathered["logits"], target, target.shape[1], average="none", ignore_index=IGNORE
        )
        mean = ap[(target == 1).any(0)].double().mean()  # a label that no sample has, has none
        exact, right = self.exact.compute(), self.right.compute()
        return {"loss": self.loss.compute(), "map": mean, "exact": exact, "label_acc": right}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {}

    def of_sample(self, logits: Scored, labels: Tensor) -> dict[str, Tensor]:
        assert isinstance(logits, Tensor)
        return {"whole": (_right(logits, labels) | labels.isnan()).all(1).double()}


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits > 0) == (labels > 0)
