"""Plots that answer the mouse, of Bokeh: curves to switch on and off, and values under the pointer.

Bokeh needs a browser to make a PNG, and Matplotlib can't answer the mouse in a file, so there are both. What
results.png shows too is described once, by `figures.Dot`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, Literal

from harness.reports.differences import rows as compared_to_baselines
from harness.reports.figures import GREY, Dot, Style, spread
from harness.reports.results import Results, name_baseline
from harness.reports.uncertainty import CONFIDENCE, Interval, holm, p_value, paired_differences, paired_interval
from lit_modules.tasks import Metric

WIDTH, HEIGHT, LINE = 1100, 420, 26  # pixels
MARKS = 12  # markers along a line, at most
NAMED, LETTER = 12, 16  # dots that have their names beside them, at most; pixels between two names
MARKERS = {
    "o": "circle",
    "s": "square",
    "D": "diamond",
    "^": "triangle",
    "v": "inverted_triangle",
    "h": "hex",
    "*": "star",
}


def intervals(dots: Sequence[Dot], teacher: Dot | None, metric: Metric) -> list[Any]:
    """Plot each student's seeds, mean and 95 % interval, with the teacher's mean as a line; nothing if all failed."""
    dots = [dot for dot in dots if dot.scores]
    if not dots:
        return []
    plot = _figure(
        height=110 + LINE * len(dots), y_range=[dot.name for dot in dots][::-1], x_axis_label=metric.title,
        tooltips=[("student", "@name"), ("mean", "@mean{0.000}"), ("interval", "@interval")],
    )  # fmt: skip
    for dot in dots:  # seeds beside the interval, not on it
        places = [(dot.name, -0.3)] * len(dot.scores)
        plot.scatter(dot.scores, places, size=5, alpha=0.5, color=dot.style.color, marker=MARKERS[dot.style.marker])
    _draw_intervals(plot, [
        {"name": dot.name, "mean": dot.mean, "low": dot.low, "high": dot.high, **_mark(dot.style),
         "interval": f"{dot.low:.{metric.digits}f} to {dot.high:.{metric.digits}f}" if len({*dot.scores}) > 1
         else "none without a spread"}
        for dot in dots
    ])  # fmt: skip
    if teacher and teacher.scores:
        _line(plot, teacher.mean, "height")
    return [plot]


def differences(results: Results) -> list[Any]:
    """Plot each student's difference to its baseline, with its interval alone and, thin, corrected; nothing of none."""
    metric, rows = results.metric, list[dict[str, Any]]()
    groups = {name: group for group, name in enumerate(results.students)}
    for name, single, corrected, _ in compared_to_baselines(results):
        intervals, row = {"": single, "corrected_": corrected or single}, _mark(Style.of(groups[name]))
        texts = {f"{kind}text": metric.difference(interval) for kind, interval in intervals.items()}
        bounds = {
            f"{kind}{key}": metric.scale * (interval[key] or 0.0)
            for kind, interval in intervals.items()
            for key in ("low", "mean", "high")
        }
        rows.append({"name": name, **row, **texts, **bounds})
    if not rows:
        return []
    plot = _figure(
        height=110 + LINE * len(rows), y_range=[row["name"] for row in rows][::-1],
        x_axis_label=f"Δ to {name_baseline(results)}, {metric.unit}",
        tooltips=[("student", "@name"), ("Δ alone", "@text"), ("Δ corrected", "@corrected_text")],
    )  # fmt: skip
    thin = {"source": _source(rows), "line_width": 1, "color": "color"}
    plot.segment("corrected_low", "name", "corrected_high", "name", **thin)
    for end in ("corrected_low", "corrected_high"):
        plot.scatter(end, "name", marker="dash", size=9, angle=math.pi / 2, **thin)
    _draw_intervals(plot, rows)
    _line(plot, 0.0, "height")
    return [plot]


def _draw_intervals(plot: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw rows with `name`, `low`, `mean` and `high`, and tell the pointer of these."""
    source = _source(rows)
    lines = plot.segment("low", "name", "high", "name", source=source, line_width=3, color="color")
    means = plot.scatter("mean", "name", source=source, size=11, color="color", marker="marker", line_color="white")
    plot.hover.renderers = [lines, means]


def compare_pairs(results: Results) -> list[dict[str, Any]]:
    """Compare all pairs of students with two common seeds or more.

    Returns:
        Of each `one`, `other`, their `difference`, its `interval`, and Holm's `p` among all pairs; None where the
        difference was the same on each seed.
    """
    metric, students = results.metric, results.students
    tested: dict[str, tuple[str, str, Interval]] = {}
    raw: dict[str, float | None] = {}
    for one, other in itertools.combinations(students, 2):
        differences = paired_differences(students[one].scores[metric.name], students[other].scores[metric.name])
        if len(differences) > 1:
            key = f"{one}\n{other}"
            tested[key], raw[key] = (one, other, paired_interval(differences)), p_value(differences)
    corrected = holm(raw)
    return [
        {"one": one, "other": other, "difference": interval["mean"], "interval": metric.difference(interval),
         "p": corrected[key]}
        for key, (one, other, interval) in tested.items()
    ]  # fmt: skip


def pairs(results: Results) -> list[Any]:
    """Plot by how much a row's student is better than a column's; grey where noise may be the reason.

    No plot if no pair has two seeds.
    """
    from bokeh.palettes import RdBu11

    metric, compared = results.metric, compare_pairs(results)
    if not compared:
        return []
    names, sign = list(results.students), 1 if metric.higher_is_better else -1
    largest = max(abs(pair["difference"]) for pair in compared) or 1.0
    cells: list[dict[str, str]] = []
    for pair in compared:
        for row, column, factor in ((pair["one"], pair["other"], 1), (pair["other"], pair["one"], -1)):
            difference, p = factor * pair["difference"], pair["p"]
            beyond = p is not None and p < 1 - CONFIDENCE
            shade = RdBu11[::-1][round(5 + 5 * sign * difference / largest)]
            dark = beyond and abs(difference) > 0.6 * largest
            mirrored = f"{metric.signed(difference)}, as {column} to {row} mirrored"
            cells.append({
                "row": row, "column": column, "difference": metric.signed(difference),
                "interval": pair["interval"] if factor == 1 else mirrored,
                "p": "none, as it was the same on each seed" if p is None else f"{p:.4f}",
                "color": shade if beyond else "#eeeeee", "ink": "white" if dark else "black",
            })  # fmt: skip
    plot = _figure(
        width=min(WIDTH, 170 + 62 * len(names)), min_width=110 + 40 * len(names), height=150 + LINE * len(names),
        x_range=names, y_range=names[::-1], x_axis_location="above",
        tooltips=[("pair", "@row to @column"), (f"difference, {metric.unit}", "@interval"), ("p, Holm", "@p")],
    )  # fmt: skip
    source = _source(cells)
    plot.rect("column", "row", 0.96, 0.92, source=source, color="color")
    middle = {"text_align": "center", "text_baseline": "middle", "text_font_size": "11px"}
    plot.text("column", "row", "difference", source=source, text_color="ink", **middle)
    plot.xaxis.major_label_orientation = 0.9
    plot.grid.visible = False
    return [plot]


def mean_curve(epochs: Sequence[Sequence[Mapping[str, float | None]] | None], name: str) -> list[float | None]:
    """Compute a value's mean over the seeds that have it, for each epoch."""
    rows = itertools.zip_longest(*(seed for seed in epochs if seed), fillvalue={})
    measured = [[values[name] for values in row if values.get(name) is not None] for row in rows]
    return [mean(values) if values else None for values in measured]  # type: ignore[type-var]


def curves(results: Results, name: str, title: str, scale: float = 1.0) -> list[Any]:
    """Plot a value over the epochs, its mean over seeds, a line for each net; nothing if no net has it."""
    nets = {**results.students, **({"teacher": results.teacher} if results.teacher else {})}
    means = {net: mean_curve(of.epochs, name) for net, of in nets.items()}
    means = {net: values for net, values in means.items() if any(value is not None for value in values)}
    if not means:
        return []
    known = [value for values in means.values() for value in values if value is not None]
    wide = 0 < 100 * min(known) < max(known)  # losses of which a large one would leave the others no height
    plot = _figure(
        x_axis_label="epoch", y_axis_label=title, y_axis_type="log" if wide else "linear",
        tooltips=[("net", "$name"), ("epoch", "@x"), (title, "@y{0.[0000]}")],
    )  # fmt: skip
    groups, lines, marks = {net: group for group, net in enumerate(results.students)}, [], []
    for net, values in means.items():
        style, heights = (
            Style.of(groups.get(net)),
            [float("nan") if value is None else scale * value for value in values],
        )
        places, look = [*range(1, len(values) + 1)], {"color": style.color, "name": net, "legend_label": net}
        lines.append(plot.line(places, heights, line_width=2, line_dash=[*style.dash], **look))
        apart = -(-len(values) // MARKS)
        marks.append(plot.scatter(places[::apart], heights[::apart], size=8, marker=MARKERS[style.marker], **look))
    plot.hover.renderers = lines if max(map(len, means.values())) > 1 else marks
    legend = plot.legend[0]  # which page.html moves to where there is room
    legend.click_policy, legend.label_text_font_size, legend.spacing = "hide", "11px", 0
    legend.ncols, legend.glyph_width, legend.border_line_color = 1 + len(means) // 16, 36, None
    return [plot]


def against(label: str, dots: Sequence[Dot]) -> list[Any]:
    """Plot the mean of the metric against a cost, for the nets of which both are known; nothing without any."""
    from bokeh.models import NumeralTickFormatter

    dots = [dot for dot in dots if dot.scores and dot.cost]
    if not dots:
        return []
    metric = dots[0].metric
    plot = _figure(
        width=WIDTH // 2 - 12, x_axis_label=label, y_axis_label=f"mean {metric.title}", x_axis_type="log",
        tooltips=[("net", "@name"), (label, "@x{0,0.[00]}"), (metric.title, "@y{0.000}")],
    )  # fmt: skip
    plot.xaxis.formatter = NumeralTickFormatter(format="0.[00]a")  # 200k: powers of ten leave no room
    plot.xaxis.minor_tick_line_color = None
    plot.x_range.range_padding = 0.2
    dots = sorted(dots, key=lambda dot: dot.mean)
    source = _source([{"name": dot.name, "x": dot.cost, "y": dot.mean, **_mark(dot.style)} for dot in dots])
    plot.hover.renderers = [
        plot.scatter("x", "y", source=source, size=11, color="color", marker="marker", line_color="white")
    ]
    if len(dots) <= NAMED:  # of more they hide each other; the pointer tells them
        _name(plot, dots)
    return [plot]


def _name(plot: Any, dots: Sequence[Dot]) -> None:
    """Write the names of dots, lowest first, beside them, moved up or down where they would hide each other."""
    low, high = dots[0].mean, dots[-1].mean
    room = 0.1 * (high - low) or 1.0
    plot.y_range.start, plot.y_range.end = low, high = low - room, high + room
    shares = spread([(dot.mean - low) / (high - low) for dot in dots], LETTER / (HEIGHT - 80))
    costs = [dot.cost or 0.0 for dot in dots]
    for dot, share in zip(dots, shares, strict=True):
        left = (dot.cost or 0.0) ** 2 > min(costs) * max(costs)  # of the dot, where there is more room
        plot.text(
            [dot.cost], [low + share * (high - low)], [dot.name], x_offset=-9 if left else 9, text_font_size="11px",
            text_align="right" if left else "left", text_baseline="middle",
        )  # fmt: skip


def _mark(style: Style) -> dict[str, str]:
    """Return columns of a source."""
    return {"color": style.color, "marker": MARKERS[style.marker]}


def _figure(**options: Any) -> Any:
    """Return a plot as wide as its page has room for, at most `width` pixels."""
    from bokeh.models import NoOverlap
    from bokeh.plotting import figure

    size = {"max_width": options.pop("width", WIDTH), "sizing_mode": "stretch_width", "height": HEIGHT}
    plot = figure(**{**size, "tools": "pan,box_zoom,wheel_zoom,reset", "output_backend": "svg", **options})
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    plot.axis.major_label_policy = NoOverlap(min_distance=8)
    return plot


def _source(rows: Sequence[Mapping[str, Any]]) -> Any:
    from bokeh.models import ColumnDataSource

    return ColumnDataSource({key: [row[key] for row in rows] for key in (rows[0] if rows else ())})


def _line(plot: Any, place: float, dimension: Literal["width", "height"]) -> None:
    from bokeh.models.annotations import Span

    plot.add_layout(Span(location=place, dimension=dimension, line_color=GREY, line_dash="dashed"))
