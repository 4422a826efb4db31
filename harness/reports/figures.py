"""Pictures of results, drawn with Agg: no backend, style or figure of the caller changes."""

import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.reports.uncertainty import Interval, t_interval
from lit_modules.tasks import ACCURACY, Metric

if TYPE_CHECKING:  # it takes a second to be imported
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Any

GREY = "#555555"
# For all eyes (Okabe and Ito, "Color Universal Design", 2008), without their yellow, which is faint on white.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#000000")
MARKERS = "osD^vh"
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 2), (2, 2), (8, 2, 2, 2), (12, 3))  # pixels on and off
LOOK = {
    "axes.prop_cycle": f"cycler('color', {[*COLORS, '#999999']})",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "axes.titlesize": 10, "axes.titlecolor": GREY, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip
LINE_INCHES = 0.18


@contextmanager
def figure(width: float = 4, height: float = 3) -> Iterator[tuple["Figure", io.BytesIO]]:
    """A Figure on Agg of so many inches, and a buffer that holds its PNG after the block."""
    import warnings

    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", LOOK]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a name in a script that the font lacks
        drawn, buffer = Figure(figsize=(width, height), dpi=120, layout="constrained"), io.BytesIO()
        FigureCanvasAgg(drawn)
        yield drawn, buffer
        drawn.savefig(buffer, format="png")


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
    """What results.png and the plots of report.html draw of one net."""

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
        _values(left, dots, dots[0].metric)
        for axes in middle:
            _differences(axes, dots, differences, to)
        if teacher is not None:
            for draw in (left.axvline, right.axhline):
                draw(teacher, color=GREY, linestyle="--", linewidth=1.2, label="teacher")
            left.legend(loc="best", frameon=False, fontsize=9)
        _against_cost(right, [dot for dot in dots if dot.scores and dot.cost is not None], dots[0].metric, cost)
    return png.getvalue()


def lines_picture(dots: Sequence[Dot], axis: str) -> bytes:
    """Draw a PNG: a line for each name, with mean and 95 % interval of its dots, at their `cost` on the axis.

    The axis is logarithmic where places differ tenfold.
    """
    with figure(8, 4.5) as (drawn, png):
        axes, finished = drawn.subplots(), [dot for dot in dots if dot.scores]
        places = sorted({dot.cost or 0.0 for dot in finished})
        if places and 0 < 10 * places[0] <= places[-1]:
            axes.set_xscale("log")
        axes.ticklabel_format(axis="y", useOffset=False)
        axes.set_xticks(places, [f"{place:,g}" for place in places])
        axes.minorticks_off()
        for name in dict.fromkeys(dot.name for dot in finished):
            line = sorted((dot for dot in finished if dot.name == name), key=lambda dot: dot.cost or 0.0)
            costs, means = [dot.cost or 0.0 for dot in line], [dot.mean for dot in line]
            errors = [[dot.mean - dot.low for dot in line], [dot.high - dot.mean for dot in line]]
            dash = line[0].style.dash
            look: dict[str, Any] = {"linestyle": (0, dash) if dash else "solid", "label": name, **line[0].look}
            axes.errorbar(costs, means, yerr=errors, capsize=3, linewidth=1.5, **look)
        axes.set_xlabel(axis)
        axes.set_ylabel(dots[0].metric.title)
        axes.set_title("mean and 95 % interval", fontsize=10, color=GREY)
        if finished:
            axes.legend()
        drawn.draw_without_rendering()
        hide_overlapping([label for label in axes.get_xticklabels() if label.get_text()])
    return png.getvalue()


def hide_overlapping(labels: Sequence[Any]) -> None:
    """Hide the labels of an axis, in their order from the left, that would touch the one before them."""
    right = -math.inf
    for label in labels:
        box = label.get_window_extent()
        label.set_visible(box.x0 > right + 4)
        right = box.x1 if label.get_visible() else right


def bounds(values: Sequence[float], metric: Metric) -> tuple[float, float]:
    """Compute the 95 % interval of the mean, within the metric's limits; without an interval, the mean twice."""
    interval, (least, most) = t_interval(values), metric.limits
    if interval["low"] is None or interval["high"] is None:
        return (statistics.mean(values),) * 2
    return max(interval["low"], least), min(interval["high"], most)  # two seeds can give an interval past 100 %


def _values(axes: "Axes", dots: Sequence[Dot], metric: Metric) -> None:
    for row, dot in enumerate(dots):
        if not dot.scores:
            axes.annotate("failed", (0.02, row), xycoords=("axes fraction", "data"), va="center", color=GREY)
            continue
        offsets = [row + 0.28 - 0.1 * (i % 2) for i in range(len(dot.scores))]  # beside the interval, not on it
        axes.scatter(dot.scores, offsets, s=14, alpha=0.45, linewidths=0, **dot.look)
        axes.plot((dot.low, dot.high), (row, row), color=dot.style.color, linewidth=2, solid_capstyle="butt")
        axes.scatter([dot.mean], [row], s=46, zorder=3, edgecolors="white", **dot.look)
    axes.set_yticks(range(len(dots)), [dot.name for dot in dots], parse_math=False)
    axes.set_ylim(len(dots) - 0.4, -0.6)
    axes.set_xlabel(metric.title)
    axes.set_title("mean, 95 % interval, each seed", fontsize=10, color=GREY)


def _differences(
    axes: "Axes", dots: Sequence[Dot], differences: Mapping[str, tuple[Interval, Interval]], label: str
) -> None:
    """Draw differences on the rows of the dots: thick the interval alone, thin the corrected one, which is wider."""
    for row, dot in enumerate(dots):
        for interval, width in zip(differences.get(dot.name, ()), (3.5, 1.0), strict=False):
            low, mean, high = (dot.metric.scale * (interval[key] or 0.0) for key in ("low", "mean", "high"))
            axes.plot(
                (low, high), (row, row), color=dot.style.color, linewidth=width, solid_capstyle="butt", marker="|"
            )
            axes.scatter([mean], [row], s=46, zorder=3, edgecolors="white", **dot.look)
    axes.axvline(0, color=GREY, linewidth=1.2)
    axes.set_yticks(range(len(dots)), [""] * len(dots))
    axes.set_ylim(len(dots) - 0.4, -0.6)
    axes.set_xlabel(label)
    axes.set_title("95 % interval: alone (thick), corrected (thin)", fontsize=10, color=GREY)


def _against_cost(axes: "Axes", dots: Sequence[Dot], metric: Metric, cost: str) -> None:
    for dot in dots:
        axes.scatter([dot.cost or 0.0], [dot.mean], s=46, zorder=3, edgecolors="white", **dot.look)
    axes.set_xlabel(cost)
    axes.set_ylabel(f"mean {metric.title}")
    axes.margins(x=0.15, y=0.12)
    _name(axes, sorted(dots, key=lambda dot: dot.mean))
    axes.set_title(f"{metric.word} against cost" if dots else "no cost was measured", fontsize=10, color=GREY)


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
