"""The report on formats: a table, and a picture of accuracy against latency."""

from collections.abc import Callable, Sequence
from functools import partial

from harness.reports.figures import figure
from harness.reports.pages import settings
from harness.reports.report import Facts, Part, Report, machine
from harness.reports.tables import NONE, Table, columns, count, short, words

AREA = 1200  # points squared, of the largest file
COLUMNS = (
    "Size: of the ONNX file, for bfloat16 of the weights as safetensors. Latency: median (95th percentile) of calls of "
    "each net in turn, compiled by Inductor with frozen weights. Images/s: at the largest batch. Difference: to "
    "float32, the largest of a logit on the test set."
)


def report(results: Facts, notes: Sequence[str]) -> Report:
    """Build the report from results.json's content and notes on what is left out."""
    rows = results["rows"]
    header = {"Data": words(results["data"]), **machine(results), "Settings": "; ".join(settings(results["config"]))}
    text: list[Part] = [table(rows), COLUMNS, *notes]
    pngs = {"results.png": picture(rows)} if _batch_sizes(rows) else {}
    return Report(header, text, [*text, "![accuracy against latency](results.png)"], pngs)


def _batch_sizes(rows: Sequence[Facts]) -> list[str]:
    """Batch sizes with a latency."""
    return sorted({size for row in rows for size in row["latency_ms"]}, key=int)


def table(rows: Sequence[Facts]) -> Table:
    """One line a format."""
    cells: dict[str, Callable[[Facts], str]] = {
        "format": lambda row: row["format"],
        "test accuracy, %": lambda row: f"{100 * row['test_acc']:.2f}",
        "correct": lambda row: count(row["test_correct"]),
        "size, KiB": lambda row: NONE if row["bytes"] is None else f"{row['bytes'] / 2**10:,.1f}",
        **{f"ms, batch {size}": partial(_latency, size) for size in _batch_sizes(rows)},
        "images/s": lambda row: short(row["images_per_second"]) if row["latency_ms"] else NONE,
        "difference": lambda row: f"{row['max_logit_difference']:.2g}",
    }
    return columns(cells, rows)


def _latency(size: str, row: Facts) -> str:
    times = row["latency_ms"].get(size)
    return f"{short(times['median'])} ({short(times['p95'])})" if times else NONE


def picture(rows: Sequence[Facts]) -> bytes:
    """A PNG: accuracy against the median latency of each batch size; areas are sizes on disk."""
    sizes = _batch_sizes(rows)
    rows = [row for row in rows if row["bytes"] is not None and row["latency_ms"]]
    largest = max((row["bytes"] for row in rows), default=1)
    with figure(5.5 * len(sizes), 4) as (drawn, png):
        for axes, size in zip(drawn.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
            for number, row in enumerate(rows):
                place = row["latency_ms"][size]["median"], 100 * row["test_acc"]
                area = AREA * row["bytes"] / largest
                axes.scatter(*place, s=area, color=f"C{number}", alpha=0.5, linewidths=0)
                axes.scatter(*place, s=8, color=f"C{number}", label=f"{row['format']}, {row['bytes'] / 2**10:,.0f} KiB")
            axes.ticklabel_format(useOffset=False)
            axes.margins(0.25)
            axes.set_xlabel("median latency, ms")
            axes.set_ylabel("test accuracy, %")
            axes.set_title(f"batch {size}; areas are sizes")
            axes.legend(loc="best")
    return png.getvalue()
