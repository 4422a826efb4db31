"""Charts of nets: intervals, differences, and the metric against a cost, as results.png and report.html have them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from harness.reports.figures import COLORS, GREY, Axes, figure
from harness.reports.svg import mark
from harness.reports.uncertainty import Interval, t_interval
from lit_modules.tasks import ACCURACY, Metric

MARKERS = "osD^vh"
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 2), (2, 2), (8, 2, 2, 2), (12, 3))  # pixels on and off
THOUSANDS = 10_000  # from which costs are written in thousands
LINE_INCHES = 0.18
AREA = 70  # of the marker of a mean, in square points


@dataclass(frozen=True)
class Style:
    """How a net is drawn: neighbours differ in each of the three, and 210 nets in one of them."""

    color: str
    marker: str  # by Matplotlib's letter
    dash: tuple[int, ...]  # of its line

    @classmethod
    def of(cls, group: int | None) -> "Style":
        """Return the style of a group's nets; None stands for the teacher."""
        if group is None:
            return cls(GREY, "*", (4, 4))
        return cls(COLORS[group % len(COLORS)], MARKERS[group % len(MARKERS)], DASHES[group % len(DASHES)])


@dataclass
class Dot:
    """What charts draw of one net."""

    name: str  # as in the table
    values: Sequence[float | None]  # the metric of each seed; None where it failed
    cost: float | None  # its place on the horizontal axis, if known
    group: int | None  # nets of one group share a style; a teacher has none, and is grey
    metric: Metric = ACCURACY  # of the values

    def __post_init__(self) -> None:
        self.scores = self.metric.scaled(self.values)  # of the seeds that finished, in the metric's unit
        self.mean = statistics.mean(self.scores) if self.scores else math.nan
        self.low, self.high = bounds(self.scores, self.metric) if self.scores else (math.nan, math.nan)
        self.style = Style.of(self.group)
        self.look: dict[str, Any] = {"color": self.style.color, "marker": self.style.marker}


def metric_picture(
    dots: Sequence[Dot],
    cost: str,
    teacher: float | None = None,
    differences: Mapping[str, tuple[Interval, Interval]] = MappingProxyType({}),
    to: str = "",
) -> bytes:
    """Draw a PNG: left each student's seeds, mean and 95 % interval, right the mean against `cost`.

    Between them, if there are any, `differences`: by the names of dots the interval alone and the corrected one, with
    the label `to`. All dots have one metric; `teacher`, the teacher's mean in its unit, is drawn as a line.
    """
    ratios = (1.1, 1.1, 1) if differences else (1.1, 1)
    with figure(4 + 3.5 * len(ratios), max(3.2, 1.5 + 0.34 * len(dots))) as (drawn, png):
        left, *middle, right = drawn.subplots(1, len(ratios), width_ratios=ratios)
        for axes in (left, right):
            axes.ticklabel_format(useOffset=False)  # 94.2, not 0.2 and a "+94" in the corner
        draw_values(left, dots, teacher)
        left.set_title("mean, 95 % interval, each seed", color=GREY)
        for axes in middle:
            draw_differences(axes, dots, differences, to)
            axes.set_yticks(range(len(dots)), [""] * len(dots))
            axes.set_title("95 % interval: alone (thick), corrected (thin)", color=GREY)
        if teacher is not None:
            right.axhline(teacher, color=GREY, linestyle="--", linewidth=1.2)
            left.legend(loc="best", frameon=False, fontsize=9)
        priced = [dot for dot in dots if dot.scores and dot.cost is not None]
        draw_against_cost(right, priced, dots[0].metric, cost)
        right.set_title(f"{dots[0].metric.word} against cost" if priced else "no cost was measured", color=GREY)
    return png.getvalue()


def bounds(values: Sequence[float], metric: Metric) -> tuple[float, float]:
    """Compute the 95 % interval of the mean, within the metric's limits; without an interval, the mean twice."""
    interval, (least, most) = t_interval(values), metric.limits
    if interval["low"] is None or interval["high"] is None:
        return (statistics.mean(values),) * 2
    return max(interval["low"], least), min(interval["high"], most)  # two seeds can give an interval past 100 %


def draw_values(axes: "Axes", dots: Sequence[Dot], teacher: float | None = None) -> None:
    """Draw a row for each dot: its seeds, its mean and its interval; and the teacher's mean, in the metric's unit."""
    metric = dots[0].metric
    for row, dot in enumerate(dots):
        if not dot.scores:
            axes.annotate("failed", (0.02, row), xycoords=("axes fraction", "data"), va="center", color=GREY)
            continue
        offsets = [row + 0.28 - 0.1 * (i % 2) for i in range(len(dot.scores))]  # beside the interval, not on it
        seeds = axes.scatter(dot.scores, offsets, s=14, alpha=0.45, linewidths=0, **dot.look)
        mark(seeds, f"{dot.name}, each seed: {', '.join(f'{score:.{metric.digits}f}' for score in dot.scores)}")
        bar = axes.plot((dot.low, dot.high), (row, row), color=dot.style.color, linewidth=2, solid_capstyle="butt")
        mean = axes.scatter([dot.mean], [row], s=AREA, zorder=3, edgecolors="white", **dot.look)
        bounds = f"{dot.low:.{metric.digits}f} to {dot.high:.{metric.digits}f}"
        interval = f"95 % interval {bounds}" if len({*dot.scores}) > 1 else "no interval without a spread"
        for artist in (*bar, mean):
            mark(artist, f"{dot.name}\nmean {dot.mean:.3f}\n{interval}")
    if teacher is not None:
        line = axes.axvline(teacher, color=GREY, linestyle="--", linewidth=1.2, label="teacher")
        mark(line, f"teacher {teacher:.3f}")
    _set_rows(axes, [dot.name for dot in dots])
    axes.set_xlabel(metric.title)


def draw_differences(
    axes: "Axes", dots: Sequence[Dot], differences: Mapping[str, tuple[Interval, Interval]], label: str
) -> None:
    """Draw differences on the rows of the dots: thick the interval alone, thin the corrected one, which is wider."""
    for row, dot in enumerate(dots):
        if dot.name not in differences:
            continue
        alone, corrected = differences[dot.name]
        title = f"{dot.name}\nΔ alone {dot.metric.difference(alone)}\nΔ corrected {dot.metric.difference(corrected)}"
        for interval, width in ((alone, 3.5), (corrected, 1.0)):
            low, mean, high = (dot.metric.scale * (interval[key] or 0.0) for key in ("low", "mean", "high"))
            look: dict[str, Any] = {"linewidth": width, "solid_capstyle": "butt", "marker": "|"}
            for artist in (
                *axes.plot((low, high), (row, row), color=dot.style.color, **look),
                axes.scatter([mean], [row], s=AREA, zorder=3, edgecolors="white", **dot.look),
            ):
                mark(artist, title)
    axes.axvline(0, color=GREY, linewidth=1.2)
    _set_rows(axes, [dot.name for dot in dots])
    axes.set_xlabel(label)


def _set_rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)


def draw_against_cost(axes: "Axes", dots: Sequence[Dot], metric: Metric, cost: str) -> None:
    """Draw the mean of the metric against a cost, for dots of which both are known."""
    for dot in dots:
        drawn = axes.scatter([dot.cost or 0.0], [dot.mean], s=AREA, zorder=3, edgecolors="white", **dot.look)
        mark(drawn, f"{dot.name}\n{cost}: {dot.cost:,.4g}\n{metric.title}: {dot.mean:.3f}")
    _set_costs(axes, [dot.cost or 0.0 for dot in dots])
    axes.set_xlabel(cost)
    axes.set_ylabel(f"mean {metric.title}")
    axes.margins(x=0.15, y=0.12)
    _name(axes, sorted(dots, key=lambda dot: dot.mean))


def _set_costs(axes: "Axes", costs: Sequence[float]) -> None:
    """Make an axis of costs logarithmic where they differ tenfold, with 20k for 20,000."""
    from matplotlib.ticker import EngFormatter, LogLocator

    least, most = min(costs, default=0.0), max(costs, default=0.0)
    if 0 < 10 * least <= most:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    if most >= THOUSANDS:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def _name(axes: "Axes", dots: Sequence[Dot]) -> None:
    """Write the names of dots, lowest first, at the right edge, each joined to its dot: costs are often too close."""
    if not dots:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    gap = min(LINE_INCHES / axes.bbox.height * axes.figure.dpi, 1 / len(dots))
    for dot, height in zip(dots, spread([(dot.mean - low) / (high - low) for dot in dots], gap), strict=True):
        axes.annotate(
            dot.name, (dot.cost or 0.0, dot.mean), xytext=(1.03, height), textcoords="axes fraction", va="center",
            fontsize=9, parse_math=False, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": dot.style.color, "alpha": 0.4, "linewidth": 0.8, "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )  # fmt: skip


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights in 0 to 1 as little as keeps them `gap` apart, by least squares."""
    groups: list[tuple[float, int]] = []  # neighbours that touch: the lowest one's height, and how many they are
    for place, target in enumerate(heights):
        height, size = target - gap * place, 1
        while groups and groups[-1][0] > height:
            below, count = groups.pop()
            height, size = (below * count + height * size) / (count + size), count + size
        groups.append((height, size))
    starts = [height for height, size in groups for _ in range(size)]
    return [min(max(height, 0.0), 1 - gap * (len(starts) - 1)) + gap * place for place, height in enumerate(starts)]
