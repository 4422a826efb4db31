"""What students are judged by: its name in results.json, its words, and how its values are written."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.reports.tables import NONE


@dataclass(frozen=True)
class Metric:
    """A value of the test, with what is kept beside it.

    Attributes:
        name: its key in results.json.
        tested: keys of all values that are kept, each with what brings it to its type; less `test_`, the module logs
            them under these names.
        columns: titles of the values that a table shows, by key.
        word: what it is called in a sentence.
        title: what an axis says, with its unit.
        unit: of differences.
        higher_is_better: whether more of it is better.
        scale: by which a value is multiplied to be in its unit.
        digits: how many stand after the point.
        counted: what a data set's sizes count.
        limits: the least and the most that a value can be, in its unit.
    """

    name: str
    tested: Mapping[str, Callable[[float], float]]
    columns: Mapping[str, str]
    word: str
    title: str
    unit: str
    higher_is_better: bool
    scale: float
    digits: int
    counted: str
    limits: tuple[float, float]

    def mean(self, values: Sequence[float | None]) -> str:
        """Mean ± standard deviation in the metric's unit, over the seeds that have a value."""
        known = self.scaled(values)
        if not known:
            return "failed"
        spread = f" ± {statistics.stdev(known):.{self.digits}f}" if len(known) > 1 else ""
        return f"{statistics.mean(known):.{self.digits}f}{spread}"

    def scaled(self, values: Sequence[float | None]) -> list[float]:
        """The values that are there, in the metric's unit."""
        return [self.scale * value for value in values if value is not None]

    def difference(self, interval: Mapping[str, float | None]) -> str:
        """A difference and its interval, in the metric's unit: `+1.20 [+0.31, +2.09]`."""
        if interval["mean"] is None:
            return NONE
        mean = self.signed(interval["mean"])
        if interval["low"] is None or interval["high"] is None:
            return mean
        return f"{mean} [{self.signed(interval['low'])}, {self.signed(interval['high'])}]"

    def signed(self, difference: float) -> str:
        """A difference in the metric's unit with its sign; what rounds to nothing has none."""
        value = round(self.scale * difference, self.digits)
        return f"{value:+.{self.digits}f}" if value else f"{0:.{self.digits}f}"


ACCURACY = Metric(
    name="test_acc",
    tested={"test_acc": float, "test_correct": round},
    columns={"test_acc": "test accuracy, %"},
    word="accuracy",
    title="test accuracy, %",
    unit="points",
    higher_is_better=True,
    scale=100.0,
    digits=2,
    counted="samples",
    limits=(0.0, 100.0),
)
BITS = Metric(
    name="test_bpc",
    tested={"test_bpc": float, "test_loss": float},
    columns={"test_loss": "test loss", "test_bpc": "bits per char"},
    word="bits per character",
    title="test bits per character",
    unit="bits",
    higher_is_better=False,
    scale=1.0,
    digits=3,
    counted="tokens",
    limits=(0.0, float("inf")),
)
METRICS = {metric.name: metric for metric in (ACCURACY, BITS)}
