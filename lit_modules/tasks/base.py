"""What a task is: what a label is, what outputs mean, how nets learn from labels and are scored, what reports show."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from apprentice.batch import Batch, label_mask
from apprentice.errors import BadInput
from lit_modules.nets.recorded import Recorded
from lit_modules.objectives.base import cross_entropy
from lit_modules.tasks.metric import Metric
from lit_modules.tasks.scores import Scores

LABELLED = "labelled"  # name of 1 for each row with a label, else 0; given if some labels are hidden
TOKENS = "tokens"  # name of the labels that count in each row, where a row has many
FIDELITY = ("kl", "agreement")  # how a net follows its teacher, for each sample: see `lit_modules.samples`


class Range(NamedTuple):
    """The smallest and the largest label, but for IGNORED ones, and whether there are such."""

    low: int
    high: int
    ignored: bool


class Task(Recorded):
    """What a label is, what a net's outputs mean, how nets learn from labels and are scored, and what reports show.

    A data module names its task; `lit_modules.tasks.task_of` makes it.

    Attributes:
        metrics: what nets can be judged by, by the values of `--metric`; the first is the default.
        metric: what nets are judged by.
        weight: of the values of a single sample, the one that is its weight in means over samples; "" for equal ones.
    """

    metrics: ClassVar[Mapping[str, Metric]]
    weight: ClassVar[str] = ""
    metric: Metric

    @classmethod
    def of_data(cls, data: Any, metric: str | None = None) -> "Task":
        """The task of a data module's samples; BadInput if nets can't be judged by this metric."""
        raise NotImplementedError

    def scores(self) -> Scores:
        """New evaluation scores of a run."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The supervised loss of each label, (b, ...), of logits (b, ..., classes) and labels (b, ...).

        Of nets that learn alone, as a teacher does: a student's term of labels is its objective's.
        """
        return cross_entropy(logits, labels)

    def check_labels(self, labels: Range, classes: int, weighted: bool, training: bool) -> None:
        """Raise BadInput if labels are no classes; `weighted` says whether their batch has a `label_weight`."""
        raise NotImplementedError

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """What of a row's labels counts, (b,), by the names LABELLED or TOKENS; nothing if each row has one label."""
        return {} if batch.label_weight is None else {LABELLED: label_mask(batch.labels)}

    def keep_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """What a record keeps of single test samples, given their values (n,) by `Scores.sampled`."""
        raise NotImplementedError

    def average_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Figures over all test samples, given their values (n,), and those of FIDELITY beside a teacher."""
        weights = values[self.weight] if self.weight else None
        return {name: float(np.average(values[name], weights=weights)) for name in FIDELITY if name in values}


def check_classes(labels: Range, lowest: int, classes: int, also: str = "") -> None:
    """Raise BadInput if labels are not between the lowest and the number of classes; `also` names what else may be."""
    if not lowest <= labels.low <= labels.high < classes:
        raise BadInput("data", f"labels from {labels.low} to {labels.high}", f"0 to {classes - 1}, the classes{also}")
