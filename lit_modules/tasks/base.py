"""What a task is: what a label is, what outputs mean, how nets learn from labels and are scored, what reports show."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from apprentice.batch import Batch, label_mask
from apprentice.errors import BadInput
from lit_modules.nets.outputs import CLASSES, LABELS, VALUES
from lit_modules.nets.specs import Recorded
from lit_modules.objectives.base import cross_entropy
from lit_modules.tasks.scores import Scores

LABELLED = "labelled"  # name of 1 for each row with a label, else 0; given if some labels are hidden
TOKENS = "tokens"  # name of the labels that count in each row, where a row has many
TEXTS = "texts"  # name of the texts in each row, where a row may have several
COUNTS = {LABELLED, TOKENS, TEXTS}
EMA = "ema_"  # how names of scores of averaged weights begin
FIDELITY = ("kl", "agreement")  # how a net follows its teacher, for each sample: see `fidelity`
NONE = "—"  # for what is not known


@dataclass(frozen=True)
class Metric:
    """A test metric, with the other values that are kept beside it."""

    name: str  # its key in results.json
    tested: tuple[str, ...]  # keys of all values that are kept
    columns: Mapping[str, str]  # titles of the values that a table shows, by key
    word: str  # its name in a sentence
    title: str  # an axis label, with the unit
    chart: str  # title of the chart of its validation
    unit: str  # of differences
    higher_is_better: bool
    scale: float  # factor from a value to its unit
    digits: int  # after the point
    counted: str  # what a data set's sizes count
    limits: tuple[float, float]  # the least and the greatest possible value, in its unit
    of_samples: str | None = None  # key of the values of single samples, if their mean is the metric
    drawn: str = ""  # what these are values of, if not of what is counted
    baseline: str = "ce"  # the student to which others are compared
    beside: tuple[str, ...] = ()  # keys of other figures that a table shows, as that of the agreement with a teacher

    @property
    def score(self) -> str:
        """Its name where it is logged, as `val/<score>`."""
        return self.name.removeprefix("test_")

    def last(self, epochs: Sequence[Mapping[str, float | None]]) -> float | None:
        """The last score of validation in what a net logged of each epoch; None if there is none."""
        known = (values.get(f"val/{self.score}") for values in reversed(epochs))
        return next((value for value in known if value is not None), None)

    def mean(self, values: Sequence[float | None]) -> str:
        """Mean ± standard deviation over the seeds that have a value, in the metric's unit."""
        known = self.scaled(values)
        if not known:
            return "failed"
        spread = f" ± {statistics.stdev(known):.{self.digits}f}" if len(known) > 1 else ""
        return f"{statistics.mean(known):.{self.digits}f}{spread}"

    def scaled(self, values: Sequence[float | None]) -> list[float]:
        """The values that are not None, in the metric's unit."""
        return [self.scale * value for value in values if value is not None]

    def difference(self, interval: Mapping[str, float | None]) -> str:
        """A difference and its interval, in the metric's unit: `+1.20 [+0.31, +2.09]`."""
        if interval["mean"] is None:
            return NONE
        low, high = interval["low"], interval["high"]
        bounds = "" if low is None or high is None else f" [{self.signed(low)}, {self.signed(high)}]"
        return f"{self.signed(interval['mean'])}{bounds}"

    def signed(self, difference: float) -> str:
        """A difference with its sign, in the metric's unit; zero after rounding has no sign."""
        value = round(self.scale * difference, self.digits)
        return f"{value:+.{self.digits}f}" if value else f"{0:.{self.digits}f}"


class BatchSize(NamedTuple):
    """How large a global batch is."""

    rows: int
    samples: int
    values: float  # of which means are, such as tokens that count
    labelled: float = 1.0  # fraction of these with a label


class Range(NamedTuple):
    """The smallest and the largest label, but for IGNORED ones, and whether there are such."""

    low: int
    high: int
    ignored: bool


class Task(Recorded):
    """What a label is, what a net's outputs mean, how nets learn from labels and are scored, and what reports show.

    A data module names its task; `lit_modules.tasks.task_of` makes it.

    Attributes:
        metrics: what nets can be judged by, by the values of `metric`; the first is the default.
        metric: what nets are judged by.
        weight: of the values of a single sample, the one that is its weight in means over samples; "" for equal ones.
        parts: import path of the parts with which a loop trains on such samples: see `lit_modules.training.parts`.
        outputs: what nets give, of `KINDS`, which objectives can compare or not. Labels of `classes` are whole numbers
            (b, ...), -1 where hidden and -100 where ignored; those of `labels` and `values` are floats as the outputs,
            (b, C), NaN where unknown; `embeddings` have none.
        net: import path of the class that holds a chosen net, whose outputs it turns into these; "" for none.
        fidelity: how a net follows its teacher, for each sample, of `FIDELITY`.
        beside_teacher: whether a validation, too, needs the teacher's outputs.
        relates_rows: whether the supervised loss of a row depends on other rows of the global batch.
    """

    metrics: ClassVar[Mapping[str, Metric]]
    weight: ClassVar[str] = ""
    parts: ClassVar[str] = "lit_modules.training.parts.Parts"
    outputs: ClassVar[str] = CLASSES
    net: ClassVar[str] = ""
    fidelity: ClassVar[tuple[str, ...]] = FIDELITY
    beside_teacher: ClassVar[bool] = False
    relates_rows: ClassVar[bool] = False
    metric: Metric

    @classmethod
    def of_data(cls, data: Any, metric: Any = None) -> "Task":
        """The task of a data module's samples; BadInput if nets can't be judged by this metric."""
        raise NotImplementedError

    def higher_is_better(self, score: str) -> bool:
        """Whether more of a score of `Scores.compute` is better; less of a loss is."""
        known = {metric.score: metric.higher_is_better for metric in (*self.metrics.values(), self.metric)}
        return known.get(score, False)

    def scores(self) -> Scores:
        """New evaluation scores of a run."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The supervised loss of each label, (b, ...), of logits (b, ..., classes) and labels (b, ...).

        Of nets that learn alone, as a teacher does: a student's term of labels is its objective's.
        """
        return cross_entropy(logits, labels)

    @property
    def loss_of_labels(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What stands for the cross-entropies of objectives; None where labels are classes, or there are none."""
        return self.loss if self.outputs in {LABELS, VALUES} else None

    def label_shape(self, outputs: Tensor) -> tuple[int, ...]:
        """Return the shape of the labels that belong to outputs of a net."""
        return tuple(outputs.shape if self.outputs in {LABELS, VALUES} else outputs.shape[:-1])

    def check_labels(self, labels: Range, classes: int, weighted: bool, training: bool) -> None:
        """Raise BadInput if labels are no classes; `weighted` says whether their batch has a `label_weight`."""
        raise NotImplementedError

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """What of a row's labels counts, (b,), by the names LABELLED or TOKENS; nothing if each row has one label."""
        return {} if batch.label_weight is None else {LABELLED: label_mask(batch.labels)}

    def batch_size(self, rows: int, counts: Mapping[str, float]) -> BatchSize:
        """The size of a global batch of so many rows, given the means over them of what `counts` gives."""
        samples, values = round(rows * counts.get(TEXTS, 1.0)), rows * counts.get(TOKENS, 1.0)
        return BatchSize(rows, samples, values, counts.get(LABELLED, 1.0))

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
