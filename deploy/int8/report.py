"""The report of a net's formats: accuracy, size, latency and how files differ, as a table, notes and a picture."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.latency import Times
from harness.reports.figures import figure
from harness.reports.report import Part, Report
from harness.reports.tables import NONE, Table, count, short, table_of

AREA = 1200  # points squared, of the largest file
COLUMNS = (
    "Size: of the ONNX file, for bfloat16 of the weights as safetensors. Latency: median (95th percentile) of calls of "
    "each net in turn, compiled by Inductor with frozen weights. Images/s: at the largest batch. Difference: to "
    "float32, the largest of a logit on the test set."
)


@dataclass(frozen=True)
class FormatRow:
    """What is measured of a format."""

    format: str  # its name
    test_acc: float  # of the test set
    test_correct: int  # predictions
    bytes: int | None  # size of its file; None where it could not be written
    latency_ms: Times  # by batch size; nothing where it could not be compiled
    images_per_second: float | None  # at the largest batch
    max_logit_difference: float  # to float32, on the test set
    files: list[str]  # that were written and read again, in the run's folder
    # By file, how its answers differ from the net's; nothing of those of older versions.
    file_differences: dict[str, dict[str, float]] = field(default_factory=dict)


def report(header: Mapping[str, str], rows: Sequence[FormatRow], notes: Sequence[str]) -> Report:
    """Build the report from the rows and notes on what is left out."""
    text: list[Part] = [table(rows), COLUMNS, *notes]
    pngs = {"results.png": picture(rows)} if _batch_sizes(rows) else {}
    return Report(header, text, [*text, "![accuracy against latency](results.png)"], pngs)


def differences(row: FormatRow, count: int) -> Iterator[str]:
    """Yield a note on each file of a format that answers otherwise than the net, on so many test images."""
    for file, facts in row.file_differences.items():
        if differ := facts["predictions"]:
            largest = f"its logits differ by up to {facts['max_logit_difference']:.2g}"
            yield f"{row.format}/{file}: {differ:,} of {count:,} predictions are others than the net's; {largest}."


def _batch_sizes(rows: Sequence[FormatRow]) -> list[str]:
    """Return batch sizes with a latency."""
    return sorted({size for row in rows for size in row.latency_ms}, key=int)


def table(rows: Sequence[FormatRow]) -> Table:
    """Return one line a format."""
    return table_of([
        ("format", [row.format for row in rows]),
        ("test accuracy, %", [f"{100 * row.test_acc:.2f}" for row in rows]),
        ("correct", [count(row.test_correct) for row in rows]),
        ("size, KiB", [NONE if row.bytes is None else f"{row.bytes / 2**10:,.1f}" for row in rows]),
        *((f"ms, batch {size}", [_latency(row, size) for row in rows]) for size in _batch_sizes(rows)),
        ("images/s", [short(row.images_per_second) for row in rows]),
        ("difference", [f"{row.max_logit_difference:.2g}" for row in rows]),
    ])  # fmt: skip


def _latency(row: FormatRow, size: str) -> str:
    times = row.latency_ms.get(size)
    return f"{short(times['median'])} ({short(times['p95'])})" if times else NONE


def picture(rows: Sequence[FormatRow]) -> bytes:
    """Draw a PNG: accuracy against the median latency of each batch size; areas are sizes on disk."""
    sizes = _batch_sizes(rows)
    placed = [(row, row.bytes) for row in rows if row.bytes is not None and row.latency_ms]
    largest = max((size for _, size in placed), default=1)
    with figure(5.5 * len(sizes), 4) as (drawn, png):
        for axes, size in zip(drawn.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
            for number, (row, file_size) in enumerate(placed):
                place, look = (row.latency_ms[size]["median"], 100 * row.test_acc), {"color": f"C{number}"}
                axes.scatter(*place, s=AREA * file_size / largest, alpha=0.5, linewidths=0, **look)
                axes.scatter(*place, s=8, label=f"{row.format}, {file_size / 2**10:,.0f} KiB", **look)
            axes.ticklabel_format(useOffset=False)
            axes.margins(0.25)
            axes.set_xlabel("median latency, ms")
            axes.set_ylabel("test accuracy, %")
            axes.set_title(f"batch {size}; areas are sizes")
            axes.legend(loc="best")
    return png.getvalue()
