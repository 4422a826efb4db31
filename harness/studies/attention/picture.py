"""Pictures of the study: what kernels reach against the length of texts, and the block in its four ways."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness.reports.figures import GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Facts = dict[str, Any]
WIDTH = 0.2  # of a bar


def kernels(rows: Sequence[Facts], peaks: Mapping[str, float]) -> bytes:
    """A PNG: TFLOP/s against length, a panel a type and direction, a line a kernel; dashed the product of matrices."""
    names = list(dict.fromkeys(row["backend"] for row in rows))
    with _panels(rows) as (panels, buffer):
        for (dtype, _), (axes, mine) in panels.items():
            for number, name in enumerate(names):
                points = sorted((row["length"], row["tflops_per_second"]) for row in mine if row["backend"] == name)
                if points:
                    # auto lies on the line of the kernel that it takes: it is drawn wide and pale beneath
                    look: dict[str, Any] = {"linewidth": 5, "alpha": 0.3} if name == "auto" else {"linewidth": 1.2}
                    axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", markersize=3, label=name, **look)
            if dtype in peaks:
                axes.axhline(peaks[dtype], color=GREY, linestyle="--", linewidth=1, label="product of matrices")
            lengths = sorted({row["length"] for row in mine})
            axes.set_xscale("log")
            axes.set_xticks(lengths, [str(length) for length in lengths], fontsize=7)
            axes.minorticks_off()
            axes.set_ylim(0)
            axes.set_xlabel("tokens of a text", fontsize=8)
            axes.set_ylabel("TFLOP/s", fontsize=8)
    return buffer.getvalue()


def blocks(rows: Sequence[Facts], _peaks: Mapping[str, float]) -> bytes:
    """A PNG: µs a call, a panel a type and direction, at each length a bar for dense and jagged, eager and compiled."""
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    with _panels(rows) as (panels, buffer):
        for axes, mine in panels.values():
            lengths = sorted({row["length"] for row in mine})
            for number, kind in enumerate(kinds):
                bars = [(lengths.index(row["length"]), row["microseconds"]) for row in mine if _kind(row) == kind]
                places = [place + WIDTH * (number - (len(kinds) - 1) / 2) for place, _ in bars]
                axes.bar(places, [time for _, time in bars], width=WIDTH, color=f"C{number}", label=kind)
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
            axes.set_xlabel("tokens of the longest text", fontsize=8)
            axes.set_ylabel("µs", fontsize=8)
    return buffer.getvalue()


def _kind(row: Facts) -> str:
    return f"{'dense' if row['lengths'] is None else 'jagged'} {'compiled' if row['compiled'] else 'eager'}"


@contextmanager
def _panels(
    rows: Sequence[Facts],
) -> Iterator[tuple[dict[tuple[str, str], tuple["Axes", list[Facts]]], io.BytesIO]]:
    """A panel for each type and direction, with its rows, and where the PNG is when the block has ended."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    dtypes, directions = (list(dict.fromkeys(row[key] for row in rows)) for key in ("dtype", "direction"))
    with matplotlib.style.context("default"):
        figure, buffer = (
            Figure(figsize=(4.2 * len(dtypes), 3 * len(directions)), dpi=120, layout="constrained"),
            io.BytesIO(),
        )
        FigureCanvasAgg(figure)
        grid = figure.subplots(len(directions), len(dtypes), squeeze=False)
        panels = {}
        for i, direction in enumerate(directions):
            for j, dtype in enumerate(dtypes):
                axes = grid[i][j]
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(alpha=0.25, linewidth=0.6)
                axes.set_title(f"{dtype}, {direction}", fontsize=10, color=GREY)
                mine = [row for row in rows if (row["dtype"], row["direction"]) == (dtype, direction)]
                panels[dtype, direction] = axes, mine
        yield panels, buffer
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=8)
        figure.savefig(buffer, format="png")
