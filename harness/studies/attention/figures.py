"""Pictures of the study: what kernels reach against the length of texts, and the block in its four ways."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.reports.figures import GREY, figure
from harness.reports.report import Facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 0.2  # of a bar


def what(row: Facts) -> str:
    """`flash`, `dense compiled`, `jagged eager`."""
    return row["name"].partition(": ")[2].partition(",")[0]


def kernels(rows: Sequence[Facts], peaks: Mapping[str, float]) -> bytes:
    """A PNG: TFLOP/s against length, a panel a type and direction, a line a kernel; dashed the product of matrices."""
    names = list(dict.fromkeys(row["backend"] for row in rows))
    with figure() as (drawn, png):
        for axes, dtype, mine in _panels(drawn, rows):
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
    return png.getvalue()


def blocks(rows: Sequence[Facts], _peaks: Mapping[str, float]) -> bytes:
    """A PNG: µs a call, a panel a type and direction, at each length a bar for dense and jagged, eager and compiled."""
    kinds = list(dict.fromkeys(what(row) for row in rows))
    with figure() as (drawn, png):
        for axes, _, mine in _panels(drawn, rows):
            lengths = sorted({row["length"] for row in mine})
            for number, kind in enumerate(kinds):
                bars = [(lengths.index(row["length"]), row["microseconds"]) for row in mine if what(row) == kind]
                places = [place + WIDTH * (number - (len(kinds) - 1) / 2) for place, _ in bars]
                axes.bar(places, [time for _, time in bars], width=WIDTH, color=f"C{number}", label=kind)
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
            axes.set_xlabel("tokens of the longest text", fontsize=8)
            axes.set_ylabel("µs", fontsize=8)
    return png.getvalue()


def _panels(drawn: "Figure", rows: Sequence[Facts]) -> Iterator[tuple["Axes", str, list[Facts]]]:
    """A panel for each type and direction, with its rows; then the legend."""
    dtypes, directions = (list(dict.fromkeys(row[key] for row in rows)) for key in ("dtype", "direction"))
    drawn.set_size_inches(4.2 * len(dtypes), 3 * len(directions))
    grid = drawn.subplots(len(directions), len(dtypes), squeeze=False)
    for line, direction in zip(grid, directions, strict=True):
        for axes, dtype in zip(line, dtypes, strict=True):
            axes.set_title(f"{dtype}, {direction}")
            yield axes, dtype, [row for row in rows if (row["dtype"], row["direction"]) == (dtype, direction)]
    handles, labels = grid[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper right", ncols=len(labels))
