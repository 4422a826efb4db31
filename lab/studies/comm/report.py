"""The report on communication: a table of the smallest and the largest size, every row, a picture."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.reports.figures import GREY, figure
from harness.reports.report import Part, Report, machine
from harness.reports.tables import NONE, Table, columns, short
from harness.studies.study import StudyHeader
from lab.studies.comm.cases import WORLD
from lab.studies.comm.measure import MessageTiming

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "µs: time of a call of the slowest rank, median over the repeats, each of several calls in a row; a message's is "
    "half of its way there and back. GB/s: 10^9 bytes. Algorithm bandwidth: bytes over time; bus bandwidth: that times "
    "2 (n - 1) / n for all-reduce, (n - 1) / n for scatter, gather, all-gather, reduce-scatter and all-to-all, 1 for "
    "the others. Bytes are those of a rank's largest buffer. All as nccl-tests define them, but that they take the "
    "mean over the ranks. Every result was checked to the bit."
)
PANELS = 4  # side by side


def report(header: StudyHeader, rows: Sequence[MessageTiming], notes: Sequence[str]) -> Report:
    """Build the report from results.json's content and notes on what failed."""
    sizes = sorted(row["bytes"] for row in rows if row["bytes"])
    columns_text = (
        f"µs at {binary_size(sizes[0])}, bus bandwidth in GB/s at {binary_size(sizes[-1])}." if sizes else "No size."
    )
    text: list[Part] = [table(rows), columns_text, COLUMNS, *notes]
    image = "![bus bandwidth against size, for each operation](results.png)"
    page = [*text, image, "## All rows", all_rows(rows)]
    return Report(machine(header), text, page, {"results.png": picture(rows)})


def binary_size(size: int) -> str:
    """Format bytes in powers of 1024: `1 KB`, `64 MB`, `1000 B`."""
    for unit, name in ((2**20, "MB"), (2**10, "KB")):
        if size >= unit and size % unit < unit / 100:
            return f"{size // unit} {name}"
    return f"{size} B"


def table(rows: Sequence[MessageTiming]) -> Table:
    """Make a table with a line for an operation and a group: latency at the smallest size, bandwidth at the largest."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    if not backends:
        return Table(["operation", "group"], [], left=2)
    header = ["operation", "group", f"µs: {backends[0]}", *backends[1:], f"GB/s: {backends[0]}", *backends[1:]]
    body = []
    for line in dict.fromkeys((row["operation"], row["group"]) for row in rows):
        line_rows = [row for row in rows if (row["operation"], row["group"]) == line]
        line_rows.sort(key=lambda row: -row["bytes"])
        # The last row of a backend counts
        smallest, largest = ({row["backend"]: row for row in order} for order in (line_rows, reversed(line_rows)))
        cells = [short(smallest[name]["latency_us"]) if name in smallest else NONE for name in backends]
        cells += [short(largest[name]["bus_gb_per_s"]) if name in largest else NONE for name in backends]
        body.append([*line, *cells])
    return Table(header, body, left=2)


def all_rows(rows: Sequence[MessageTiming]) -> Table:
    """Make a table with a line for each row."""
    gloo = {(row["operation"], row["group"], row["bytes"]): row for row in rows if row["backend"] == "gloo"}

    def over_gloo(row: MessageTiming) -> str:
        rival = gloo.get((row["operation"], row["group"], row["bytes"]))
        return NONE if rival is None or rival is row else f"{row['latency_us'] / rival['latency_us']:.2f} x"

    cells = {
        "operation": lambda row: row["operation"],
        "group": lambda row: row["group"],
        "backend": lambda row: row["backend"],
        "size": lambda row: binary_size(row["bytes"]) if row["bytes"] else NONE,
        "µs": lambda row: short(row["latency_us"]),
        "algorithm GB/s": lambda row: short(row["algorithm_gb_per_s"]),
        "bus GB/s": lambda row: short(row["bus_gb_per_s"]),
        "over gloo": over_gloo,
    }
    return columns(cells, rows, left=3)


def picture(rows: Sequence[MessageTiming]) -> bytes:
    """Draw bus bandwidth against size: a panel for an operation, a line for a backend, dashed for the sub-group."""
    rows = [row for row in rows if row["bytes"]]
    operations, backends = (list(dict.fromkeys(row[key] for row in rows)) for key in ("operation", "backend"))
    lines = max(1, -(-len(operations) // PANELS))
    with figure(13, 0.8 + 2.6 * lines) as (canvas, png):
        panels = list(canvas.subplots(lines, PANELS, squeeze=False).flat)
        for axes in panels[len(operations) :]:
            axes.set_axis_off()
        for axes, operation in zip(panels, operations, strict=False):
            axes.set_title(operation, parse_math=False)
            _panel(axes, [row for row in rows if row["operation"] == operation], backends)
        handles = [panels[0].plot([], [], "o-", color=f"C{i}", label=name)[0] for i, name in enumerate(backends)]
        handles += panels[0].plot([], [], "--", color=GREY, label="sub-group")
        canvas.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9)
        canvas.supylabel("bus bandwidth, GB/s", fontsize=10, color=GREY)
    return png.getvalue()


def _panel(axes: "Axes", rows: Sequence[MessageTiming], backends: Sequence[str]) -> None:
    for group in dict.fromkeys(row["group"] for row in rows):
        for number, backend in enumerate(backends):
            line_rows = [row for row in rows if (row["group"], row["backend"]) == (group, backend)]
            points = sorted((row["bytes"], row["bus_gb_per_s"]) for row in line_rows)
            style = "o-" if group == WORLD else "--"
            if points:
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", markersize=3, linewidth=1.2)
    sizes = sorted({row["bytes"] for row in rows if row["group"] == WORLD})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sizes[::2], [binary_size(size) for size in sizes[::2]], fontsize=7)
    axes.minorticks_off()
