"""Curves of a bake-off: what nets logged of each epoch, a line each, which a click on its name hides."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from harness.reports.charts import Style
from harness.reports.results import Epochs, Results
from harness.reports.svg import HALF, HEIGHT, mark, svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = 12  # markers along a line, at most
NAMES = 22  # of lines, in a column
SPREAD = 100  # between the least and the greatest value, above which the axis is logarithmic

Curve = list[tuple[int, float]]  # epochs, and a value of each


def mean_curve(epochs: Sequence[Epochs | None], name: str) -> Curve:
    """Return the epochs of which some seed has a value, and the mean of those that have it."""
    curve = []
    for epoch, rows in enumerate(itertools.zip_longest(*filter(None, epochs), fillvalue={}), 1):
        known = [value for row in rows if (value := row.get(name)) is not None]
        if known:
            curve.append((epoch, mean(known)))
    return curve


def curves(results: Results, name: str, title: str, scale: float = 1.0) -> list[str]:
    """Draw the means over seeds of a value, a line for each net, as an SVG; nothing if no net has it."""
    nets = {**results.students, **({"teacher": results.teacher} if results.teacher else {})}
    styles = {**{net: Style.of(group) for group, net in enumerate(results.students)}, "teacher": Style.of(None)}
    means = {net: [(epoch, scale * y) for epoch, y in mean_curve(of.epochs, name)] for net, of in nets.items()}
    means = {net: curve for net, curve in means.items() if curve}
    if not means:
        return []

    def draw(figure: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        for net, curve in means.items():
            _draw_curve(axes, net, curve, styles[net])
        heights = [height for curve in means.values() for _, height in curve]
        if 0 < SPREAD * min(heights) < max(heights):  # losses of which a large one would leave the others no height
            axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("epoch")
        axes.set_ylabel(title)
        _draw_names(figure, {net: styles[net] for net in means})

    return [svg(HALF, HEIGHT, draw)]


def _draw_curve(axes: "Axes", net: str, curve: Curve, style: Style) -> None:
    epochs, heights = zip(*curve, strict=True)
    (line,) = axes.plot(epochs, heights, **_line(style))
    mark(line, net, {"data-net": net})
    apart = -(-len(curve) // MARKS)
    for epoch, height in curve[::-apart]:  # the last one, and others
        (point,) = axes.plot(epoch, height, style.marker, color=style.color, markersize=5)
        mark(point, f"{net}\nepoch {epoch}: {height:.4g}", {"data-net": net})


def _line(style: Style) -> Mapping[str, Any]:
    return {"color": style.color, "linestyle": (0, style.dash) if style.dash else "solid", "linewidth": 1.5}


def _draw_names(figure: "Figure", styles: Mapping[str, Style]) -> None:
    """Draw the names of lines, each of which a click hides."""
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], **_line(style), marker=style.marker, markersize=5) for style in styles.values()]
    names = figure.legend(
        lines, [*styles], loc="outside right upper", ncols=-(-len(styles) // NAMES), handlelength=3
    )  # fmt: skip
    mark(names, attributes={"class": "names"})
    for net, line, text in zip(styles, names.legend_handles, names.get_texts(), strict=True):
        text.set_parse_math(False)
        mark(line, attributes={"data-net": net})
        mark(text, attributes={"data-net": net, "role": "button", "tabindex": "0"})
