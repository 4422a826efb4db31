"""Metrics that students are judged by: keys in results.json, words, and how values are written."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.reports.tables import NONE


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
METRICS = {metric.name: metric for metric in (ACCURACY, BITS)}
