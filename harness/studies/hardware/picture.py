"""The rows in one picture."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.reports.figures import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
Facts = dict[str, Any]


def picture(rows: Sequence[Facts]) -> bytes:
    """A PNG with a bar a row in each of four panels: speed-up, memory a rank, bytes sent, difference to one process."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.style.context("default"):
        figure = Figure(figsize=(13, max(3.2, 1.3 + 0.34 * len(rows))), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 4, sharey=True)
        for axes in panels:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="x", alpha=0.25, linewidth=0.6)
        _speed(panels[0], rows)
        _memory(panels[1], rows)
        _sent(panels[2], rows)
        _difference(panels[3], rows)
        panels[0].set_yticks(range(len(rows)), [row["strategy"] for row in rows], parse_math=False)
        panels[0].set_ylim(len(rows) - 0.4, -0.6)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _speed(axes: "Axes", rows: Sequence[Facts]) -> None:
    axes.barh(range(len(rows)), [row["speedup"] for row in rows], height=0.6, color="C0")
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1.2)
    for place, row in enumerate(rows):
        axes.annotate(f" {row['images_per_second']:,.0f}", (row["speedup"], place), va="center", fontsize=8)
    axes.margins(x=0.25)
    axes.set_title("speed-up over one process; images/s", fontsize=10, color=GREY)


def _memory(axes: "Axes", rows: Sequence[Facts]) -> None:
    for key, shift, color, label in (("peak_memory", 0.15, "C7", "peak"), ("state_bytes", -0.15, "C1", "state")):
        values = [max((x or 0 for x in row[f"{key}_per_rank"]), default=0) / MIB for row in rows]
        axes.barh([place + shift for place in range(len(rows))], values, height=0.3, color=color, label=label)
    axes.legend(loc="best", frameon=False, fontsize=8)
    axes.set_title("MiB a rank", fontsize=10, color=GREY)


def _sent(axes: "Axes", rows: Sequence[Facts]) -> None:
    axes.barh(range(len(rows)), [(row["bytes_sent_per_step"] or 0) / MIB for row in rows], height=0.6, color="C2")
    for place, row in enumerate(rows):
        if row["bytes_sent_per_step"] is None:
            axes.annotate(" not measured", (0, place), va="center", fontsize=8, color=GREY)
        elif row["hidden_share"] is not None:
            said = f" {100 * row['hidden_share']:.0f} % hidden"
            axes.annotate(said, (row["bytes_sent_per_step"] / MIB, place), va="center", fontsize=8)
    axes.margins(x=0.4)
    axes.set_title("MiB sent a step and rank", fontsize=10, color=GREY)


def _difference(axes: "Axes", rows: Sequence[Facts]) -> None:
    """On a logarithmic axis, where what is 0 has no place: it is written."""
    shown = [(place, row["max_difference"]) for place, row in enumerate(rows) if not row["exact"]]
    axes.scatter([value for _, value in shown if value], [place for place, value in shown if value], s=40, color="C3")
    axes.set_xscale("log")
    axes.set_xlim(1e-18, 10)
    for place, row in enumerate(rows):
        if row["exact"] or not row["max_difference"]:
            said = "not finite" if row["max_difference"] is None else f"{row['max_difference']:g}"
            axes.annotate(f"{said} bits" if row["exact"] else said, (2e-18, place), va="center", fontsize=8)
    axes.set_title("largest difference of a weight", fontsize=10, color=GREY)
