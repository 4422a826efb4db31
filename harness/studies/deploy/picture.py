"""The formats in one picture."""

import io
from collections.abc import Sequence
from typing import Any

from harness.reports.figures import GREY

AREA = 1200  # points squared, of the largest file


def batch_sizes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Those at which there are latencies."""
    return sorted({size for row in rows for size in row["latency_ms"]}, key=int)


def picture(rows: Sequence[dict[str, Any]]) -> bytes:
    """A PNG: accuracy against the median latency of each batch size; areas are sizes on disk."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = batch_sizes(rows)
    rows = [row for row in rows if row["bytes"] is not None and row["latency_ms"]]
    largest = max((row["bytes"] for row in rows), default=1)
    with matplotlib.style.context("default"):
        figure = Figure(figsize=(5.5 * len(sizes), 4), dpi=120, layout="constrained")
        FigureCanvasAgg(figure)
        for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
            for number, row in enumerate(rows):
                place = row["latency_ms"][size]["median"], 100 * row["test_acc"]
                area = AREA * row["bytes"] / largest
                axes.scatter(*place, s=area, color=f"C{number}", alpha=0.5, linewidths=0)
                axes.scatter(*place, s=8, color=f"C{number}", label=f"{row['format']}, {row['bytes'] / 2**10:,.0f} KiB")
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.6)
            axes.ticklabel_format(useOffset=False)
            axes.margins(0.25)
            axes.set_xlabel("median latency, ms")
            axes.set_ylabel("test accuracy, %")
            axes.set_title(f"batch {size}; areas are sizes", fontsize=10, color=GREY)
            axes.legend(loc="best", frameon=False, fontsize=8)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
