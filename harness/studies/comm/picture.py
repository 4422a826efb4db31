"""Bus bandwidth against size, a panel an operation."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.reports.figures import GREY
from harness.studies.comm.rows import WORLD, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Facts = dict[str, Any]
COLUMNS = 4


def picture(rows: Sequence[Facts]) -> bytes:
    """A PNG: in each panel a line a backend, dashed for the sub-group; what sends nothing is left out."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["bytes"]]
    operations = list(dict.fromkeys(row["operation"] for row in rows))
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    lines = max(1, -(-len(operations) // COLUMNS))
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(13, 0.8 + 2.6 * lines), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        panels = list(figure.subplots(lines, COLUMNS, squeeze=False).flat)
        for axes in panels[len(operations) :]:
            axes.set_axis_off()
        for axes, operation in zip(panels, operations, strict=False):
            _panel(axes, operation, [row for row in rows if row["operation"] == operation], backends)
        handles = [panels[0].plot([], [], "o-", color=f"C{i}", label=name)[0] for i, name in enumerate(backends)]
        handles += panels[0].plot([], [], "--", color=GREY, label="sub-group")
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=9)
        figure.supylabel("bus bandwidth, GB/s", fontsize=10, color=GREY)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _panel(axes: "Axes", operation: str, rows: Sequence[Facts], backends: Sequence[str]) -> None:
    axes.set_title(operation, fontsize=10, color=GREY, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    for group in dict.fromkeys(row["group"] for row in rows):
        for number, backend in enumerate(backends):
            mine = [row for row in rows if (row["group"], row["backend"]) == (group, backend)]
            points = sorted((row["bytes"], row["bus_gb_per_s"]) for row in mine)
            style = "o-" if group == WORLD else "--"
            if points:
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", markersize=3, linewidth=1.2)
    sizes = sorted({row["bytes"] for row in rows if row["group"] == WORLD})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes[::2], [words(size) for size in sizes[::2]], fontsize=7)
    axes.minorticks_off()
