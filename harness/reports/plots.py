"""Plots that answer the mouse, of Bokeh: curves to switch on and off, and values under the pointer.

Bokeh needs a browser to make a PNG, and Matplotlib can't answer the mouse in a file, so there are both. What
results.png shows too is described once, by `figures.Dot`.
"""

import itertools
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, Literal

from harness.reports.figures import COLORS, GREY, Dot
from harness.reports.results import Results
from harness.reports.uncertainty import CONFIDENCE, Interval, holm, p_value, paired_differences, paired_interval

WIDTH, HEIGHT, LINE = 1100, 420, 26
DASHES = ("solid", "dashed", "dotted", "dotdash")


def intervals(dots: Sequence[Dot], teacher: Dot) -> list[Any]:
    """Plot each student's seeds, mean and 95 % interval, with the teacher's mean as a line; nothing if all failed."""
    dots, metric = [dot for dot in dots if dot.scores], teacher.metric
    if not dots:
        return []
    plot = _figure(
        height=110 + LINE * len(dots), y_range=[dot.name for dot in dots][::-1], x_axis_label=metric.title,
        tooltips=[("student", "@name"), ("mean", "@mean{0.000}"), ("interval", "@interval")],
    )  # fmt: skip
    for dot in dots:
        plot.scatter(dot.scores, [dot.name] * len(dot.scores), size=5, alpha=0.4, color=dot.color)
    source = _source([
        {"name": dot.name, "mean": dot.mean, "low": dot.low, "high": dot.high, "color": dot.color,
         "interval": f"{dot.low:.{metric.digits}f} to {dot.high:.{metric.digits}f}" if len({*dot.scores}) > 1
         else "none without a spread"}
        for dot in dots
    ])  # fmt: skip
    plot.segment("low", "name", "high", "name", source=source, line_width=3, color="color")
    plot.scatter("mean", "name", source=source, size=11, color="color", line_color="white")
    if teacher.scores:
        _line(plot, teacher.mean, "height")
    return [plot]


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
        width=max(340, min(WIDTH, 170 + 62 * len(names))), height=150 + LINE * len(names), x_range=names,
        y_range=names[::-1], x_axis_location="above",
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
    nets = {**results.students, "teacher": results.teacher}
    means = {net: mean_curve(of.epochs, name) for net, of in nets.items()}
    means = {net: values for net, values in means.items() if any(value is not None for value in values)}
    if not means:
        return []
    plot = _figure(
        x_axis_label="epoch", y_axis_label=title, tooltips=[("net", "$name"), ("epoch", "@x"), (title, "@y")]
    )
    # Colours repeat after ten, then in another style.
    looks = zip(itertools.cycle(COLORS), itertools.cycle(dash for dash in DASHES for _ in COLORS))
    for (net, values), (color, dash) in zip(means.items(), looks, strict=False):
        heights = [float("nan") if value is None else scale * value for value in values]
        style: dict[str, Any] = {"color": GREY, "line_dash": "dashed"} if net == "teacher" else {}
        places, style = list(range(1, len(values) + 1)), {"color": color, "line_dash": dash, **style}
        if len(values) == 1:
            plot.scatter(places, heights, name=net, legend_label=net, size=8, color=style["color"])
        else:
            plot.line(places, heights, name=net, legend_label=net, line_width=2, **style)
    legend = plot.legend[0]
    legend.click_policy, legend.label_text_font_size, legend.spacing = "hide", "11px", 0
    legend.ncols = 1 + len(means) // 16
    plot.add_layout(legend, "right")
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
    plot.x_range.range_padding = 0.4  # for the name to the right of the last dot
    source = _source([{"name": dot.name, "x": dot.cost, "y": dot.mean, "color": dot.color} for dot in dots])
    plot.scatter("x", "y", source=source, size=11, color="color", line_color="white")
    if len(dots) <= 12:  # of more they hide each other; the pointer tells them
        plot.text("x", "y", "name", source=source, x_offset=8, y_offset=5, text_font_size="11px")
    return [plot]


def _figure(**options: Any) -> Any:
    from bokeh.plotting import figure

    plot = figure(**{"width": WIDTH, "height": HEIGHT, "tools": "pan,box_zoom,wheel_zoom,reset", **options})
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    return plot


def _source(rows: Sequence[Mapping[str, Any]]) -> Any:
    from bokeh.models import ColumnDataSource

    return ColumnDataSource({key: [row[key] for row in rows] for key in (rows[0] if rows else ())})


def _line(plot: Any, place: float, dimension: Literal["width", "height"]) -> None:
    from bokeh.models.annotations import Span

    plot.add_layout(Span(location=place, dimension=dimension, line_color=GREY, line_dash="dashed"))
