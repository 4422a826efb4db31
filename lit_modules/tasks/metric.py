"""What nets are judged by, as tables, pages and plots show it."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
