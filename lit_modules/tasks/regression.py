"""Numbers: one or several a sample, of which some may be unknown."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from apprentice.batch import Batch
from apprentice.errors import BadInput
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.outputs import VALUES
from lit_modules.tasks.base import Metric, Range, Task
from lit_modules.tasks.multilabel import mean_of_known
from lit_modules.tasks.scores import ExactMean, Gathered, Scored, Scores

TITLES = {"test_r2": "R²", "test_mae": "MAE"}
INFINITE = float("inf")


def _metric(score: str, word: str, higher_is_better: bool, limits: tuple[float, float]) -> Metric:
    return Metric(
        name=f"test_{score}", tested=tuple(TITLES), columns=TITLES, word=word, title=f"test {word}",
        chart=f"validation {word}", unit=word, higher_is_better=higher_is_better, scale=1.0, digits=4,
        counted="samples", limits=limits, of_samples=None if higher_is_better else "test_error",
    )  # fmt: skip


class Regression(Task):
    """Samples with D numbers each, (b, D) floats, NaN where unknown; nets give standardised ones (b, D).

    A net's outputs stand for (y - mean) / std, by which the loss of a sample is the mean squared difference over its
    known numbers, 0 if it has none. Scores are of numbers in the data's own unit.

    Args:
        mean: of each number, over the samples that train.
        std: deviation of each number, likewise.
        metric: what nets are judged by: `r2`, the mean over numbers of R²; `mae`, the mean absolute error.
    """

    metrics: ClassVar[Mapping[str, Metric]] = MappingProxyType(
        {"r2": _metric("r2", "R²", True, (-INFINITE, 1.0)), "mae": _metric("mae", "MAE", False, (0.0, INFINITE))}
    )
    outputs = VALUES
    fidelity = ()

    def __init__(self, mean: Sequence[float] = (0.0,), std: Sequence[float] = (1.0,), metric: str = "r2") -> None:
        super().__init__()
        if metric not in self.metrics:
            raise BadInput("metric", metric, f"{' or '.join(self.metrics)}, by which numbers are judged")
        self.mean, self.std, self.metric = tuple(mean), tuple(std), self.metrics[metric]

    @classmethod
    def of_data(cls, data: Any, metric: Any = None) -> "Regression":
        mean, std = data.label_scale
        return cls(mean.tolist(), std.tolist(), metric or "r2")

    def scores(self) -> "ValueScores":
        return ValueScores(self)

    def standardize(self, labels: Tensor, dtype: torch.dtype) -> Tensor:
        """Return numbers (b, D) as nets give them."""
        mean, std = (
            torch.tensor(values, dtype=torch.float64, device=labels.device) for values in (self.mean, self.std)
        )
        return ((labels.double() - mean) / std).to(dtype)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return (b,), the mean squared differences of outputs (b, D) and the known labels (b, D), standardised."""
        outputs = widen(logits)
        return mean_of_known((outputs - self.standardize(labels, outputs.dtype).nan_to_num()).square(), labels)

    def check_labels(self, labels: Range, classes: int, weighted: bool, training: bool) -> None:
        raise BadInput("data", "labels that are whole numbers", "floats, NaN where a number is unknown")

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def keep_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"error": values["error"]}


class ValueScores(Scores):
    """Loss, R² and the mean absolute error, of known numbers alone; in the data's unit."""

    names = ("r2", "mae")
    trained = ()
    sampled = ("error",)

    def __init__(self, task: Regression) -> None:
        super().__init__()
        self.task = task
        self.loss, self.error = ExactMean(), ExactMean()
        self.gathered = Gathered("outputs", "labels")

    def update(self, logits: Scored, labels: Tensor) -> None:
        assert isinstance(logits, Tensor)
        self.loss.update(self.task.loss(logits, labels))
        self.error.update(self.of_sample(logits, labels)["error"][(~labels.isnan()).any(1)])
        self.gathered.update(self.index, outputs=logits, labels=labels)

    def compute(self) -> dict[str, Tensor]:
        gathered = self.gathered.compute()
        labels = self.task.standardize(gathered["labels"], torch.float64)
        known = ~labels.isnan()
        mean = labels.nanmean(0)
        rest = (gathered["outputs"] - labels).square().where(known, 0.0).sum(0)
        whole = (labels - mean).square().where(known, 0.0).sum(0)
        return {"loss": self.loss.compute(), "r2": (1 - rest / whole).mean(), "mae": self.error.compute()}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {}

    def of_sample(self, logits: Scored, labels: Tensor) -> dict[str, Tensor]:
        """Return as `error` (b,) the mean absolute error of a sample's known numbers."""
        assert isinstance(logits, Tensor)
        std = torch.tensor(self.task.std, dtype=torch.float64, device=labels.device)
        distance = (logits.double() - self.task.standardize(labels, torch.float64).nan_to_num()).abs() * std
        return {"error": mean_of_known(distance, labels)}
