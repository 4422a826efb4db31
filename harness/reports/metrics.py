"""What students are judged by: metrics, and the sentence that intervals over seeds support."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.reports.tables import NONE, listed
from harness.reports.uncertainty import (
    CONFIDENCE,
    Interval,
    detectable,
    holm,
    lead_by_chance,
    p_value,
    paired_interval,
    seeds_for,
    true_spread,
)


@dataclass(frozen=True)
class Metric:
    """A test metric, with the other values that are kept beside it."""

    name: str  # its key in results.json
    tested: tuple[str, ...]  # keys of all values that are kept
    columns: Mapping[str, str]  # titles of the values that a table shows, by key
    word: str  # its name in a sentence
    title: str  # an axis label, with the unit
    unit: str  # of differences
    higher_is_better: bool
    scale: float  # factor from a value to its unit
    digits: int  # after the point
    counted: str  # what a data set's sizes count
    limits: tuple[float, float]  # the least and the greatest possible value, in its unit

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


ACCURACY = Metric(
    name="test_acc", tested=("test_acc", "test_correct"), columns={"test_acc": "test accuracy, %"},
    word="accuracy", title="test accuracy, %", unit="points", higher_is_better=True,
    scale=100.0, digits=2, counted="samples", limits=(0.0, 100.0),
)  # fmt: skip
BITS = Metric(
    name="test_bpc", tested=("test_bpc", "test_loss"), columns={"test_loss": "test loss", "test_bpc": "bits per char"},
    word="bits per character", title="test bits per character", unit="bits", higher_is_better=False,
    scale=1.0, digits=3, counted="tokens", limits=(0.0, float("inf")),
)  # fmt: skip
BALANCED = replace(
    ACCURACY, name="test_balanced_accuracy", tested=("test_balanced_accuracy", *ACCURACY.tested),
    columns={"test_balanced_accuracy": "test balanced accuracy, %"},
    word="balanced accuracy", title="test balanced accuracy, %",
)  # fmt: skip
TOP5 = replace(
    ACCURACY, name="test_top5", tested=("test_top5", *ACCURACY.tested), columns={"test_top5": "test top-5 accuracy, %"},
    word="top-5 accuracy", title="test top-5 accuracy, %",
)  # fmt: skip
F1 = replace(
    ACCURACY, name="test_f1", tested=("test_f1", *ACCURACY.tested), columns={"test_f1": "test F1 score, %"},
    word="F1 score", title="test F1 score, %",
)  # fmt: skip
OF_CLASSES: Mapping[str, Metric] = {"accuracy": ACCURACY, "balanced_accuracy": BALANCED, "top5": TOP5, "f1": F1}
METRICS = {metric.name: metric for metric in (*OF_CLASSES.values(), BITS)}


def paired_differences(values: Sequence[float | None], baseline: Sequence[float | None]) -> list[float]:
    """`values - baseline` for each seed in which both finished."""
    return [v - b for v, b in zip(values, baseline, strict=True) if v is not None and b is not None]


def conclude(baseline: str, differences: Mapping[str, Sequence[float]], metric: Metric = ACCURACY) -> str:
    """One line that says which students differ from the baseline by more than the noise between seeds.

    `differences` are paired, by the other students' names, one per seed; empty where a student can't be compared.
    """
    pairs = {name: len(values) for name, values in differences.items() if values}
    tested = {name: paired_interval(differences[name]) for name, number in pairs.items() if number > 1}
    single = [name for name in pairs if name not in tested]
    if not tested:
        claim = f"nothing here says that any other row differs from {baseline} by more than noise"
        return f"One seed gives no interval: {claim}. Use --seeds 3 or more." if single else ""
    said = _claims(baseline, tested, holm({name: p_value(differences[name]) for name in tested}), metric)
    if single:
        said.append(f"{listed(single)} had one seed to compare, so no interval")
    few, many = min(pairs[name] for name in tested), max(pairs[name] for name in tested)
    seeds = f"{few}" if few == many else f"{few} to {many}"
    together = f" Corrected for {len(tested)} comparisons (Holm); the intervals are not." if len(tested) > 1 else ""
    spreads = [statistics.stdev(differences[name]) for name, interval in tested.items() if interval["low"] is not None]
    power = _power(statistics.median(spreads), few, len(tested), metric) if spreads else ""
    return f"With {seeds} seeds, {'; '.join(said)}.{together}{power}"


def _power(spread: float, seeds: int, comparisons: int, metric: Metric) -> str:
    """What so many seeds can show where they showed differences of this deviation, and what a third of that would take.

    It is not corrected for several comparisons, of which Holm's correction depends on the others' differences. Of two
    seeds nothing is said: they leave it open over a factor of 70.
    """
    if seeds < 3:
        return ""
    differences = [metric.scale * detectable(each, seeds) for each in true_spread(spread, seeds)]
    if not round(differences[0] / 3, metric.digits):
        return ""
    seen, low, high = (f"{min(each, metric.limits[1]):.{metric.digits}f}" for each in differences)
    more = seeds_for(1.0, detectable(1.0, seeds) / 3)
    alone = "In a single comparison, " if comparisons > 1 else ""
    said = f" {alone}{seeds} seeds show a difference of about {seen} {metric.unit} in 4 of 5 cases ({low} to {high}"
    third = f"; a third of it takes {more} seeds" if more else ""
    return f"{said}, as they tell the noise no better){third}."


def lead(rows: Sequence[Sequence[float | None]], metric: Metric) -> str:
    """One line for a table sorted by the metric: how far the first of equal students is ahead; empty where unknown."""
    whole = np.array([values for values in rows if None not in values], dtype=float)
    if whole.ndim < 2 or min(whole.shape) < 2:
        return ""
    ahead = f"{metric.scale * lead_by_chance(whole):.{metric.digits}f} {metric.unit}"
    return (
        f"Sorted by {metric.word}: were these {len(whole)} students equal, the first would be about {ahead} better "
        "than their mean by the noise between seeds alone."
    )


def _claims(
    baseline: str, tested: Mapping[str, Interval], p_values: Mapping[str, float | None], metric: Metric
) -> list[str]:
    groups: dict[str, list[str]] = {"better": [], "worse": [], "level": [], "flat": []}
    for name, interval in tested.items():
        groups[_kind(interval, p_values[name], metric)].append(name)
    said = []
    for word in ("better", "worse"):
        if names := groups[word]:
            shown = listed([f"{name} ({metric.signed(tested[name]['mean'] or 0.0)})" for name in names])
            verb = "is" if len(names) == 1 else "are"
            said.append(f"{shown} {verb} {word} than {baseline} beyond the noise between seeds")
    if groups["level"]:
        said.append(f"{listed(groups['level'])} can't be told apart from {'it' if said else baseline}")
    if groups["flat"]:
        said.append(f"{listed(groups['flat'])} differed by the same on each seed, which is no measure of noise")
    return said


def _kind(interval: Interval, p: float | None, metric: Metric) -> str:
    mean = interval["mean"] or 0.0
    if p is None:  # few seeds and a small test set: the same number of samples each time
        return "flat" if mean else "level"
    if p >= 1 - CONFIDENCE:
        return "level"
    return "better" if (mean > 0) == metric.higher_is_better else "worse"
