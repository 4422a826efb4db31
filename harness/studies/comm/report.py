"""The study told: a table on the terminal, results.md with every row, results.png."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.reports.tables import NONE, Table, paragraph, short
from harness.runs.files import write_bytes, write_text
from harness.studies.comm.picture import picture
from harness.studies.comm.rows import words
from harness.studies.hardware.report import words as told

Facts = dict[str, Any]
COLUMNS = (
    "µs: time of a call of the slowest rank, median over the repeats, each of several calls in a row; a message's is "
    "half of its way there and back. GB/s: 10^9 bytes. Algorithm bandwidth: bytes over time; bus bandwidth: that times "
    "2 (n - 1) / n for all-reduce, (n - 1) / n for scatter, gather, all-gather, reduce-scatter and all-to-all, 1 for "
    "the others. Bytes are those of a rank's largest buffer. All as nccl-tests define them, but that they take the "
    "mean over the ranks. Every result was checked to the bit."
)


def text(results: Facts, notes: Sequence[str]) -> str:
    """The table of the smallest and the largest size for a terminal."""
    rows = results["rows"]
    return "\n\n".join([table(rows).plain(), *map(paragraph, [_sizes(rows), COLUMNS, *notes])])


def _sizes(rows: Sequence[Facts]) -> str:
    sizes = sorted(row["bytes"] for row in rows if row["bytes"])
    return f"µs at {words(sizes[0])}, bus bandwidth in GB/s at {words(sizes[-1])}." if sizes else "No size."


def save(folder: Path, results: Facts, notes: Sequence[str]) -> None:
    """Write results.md and results.png.

    Raises:
        OSError: the folder can't be written.
    """
    write_text(folder / "results.md", markdown(results, notes))
    write_bytes(folder / "results.png", picture(results["rows"]))


def markdown(results: Facts, notes: Sequence[str]) -> str:
    """results.md: what was measured on what, the short table, the picture, every row."""
    rows = results["rows"]
    header = "\n".join(f"- {name}: {told(results[name.lower()])}" for name in ("Hardware", "Versions"))
    image = "![bus bandwidth against size, for each operation](results.png)"
    parts = ["# comm", header, table(rows).markdown(), _sizes(rows), COLUMNS, *notes, image]
    return "\n\n".join([*parts, "## All rows", every(rows).markdown()]) + "\n"


def table(rows: Sequence[Facts]) -> Table:
    """A line for an operation and a group: each backend's latency at the smallest size, bandwidth at the largest."""
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    if not backends:
        return Table(["operation", "group"], [], left=2)
    header = ["operation", "group", f"µs: {backends[0]}", *backends[1:], f"GB/s: {backends[0]}", *backends[1:]]
    lines = dict.fromkeys((row["operation"], row["group"]) for row in rows)
    body = [
        [*line, *_cells(rows, line, backends, "latency_us", min), *_cells(rows, line, backends, "bus_gb_per_s", max)]
        for line in lines
    ]
    return Table(header, body, left=2)


def _cells(rows: Sequence[Facts], line: tuple[str, str], backends: Sequence[str], key: str, pick: Any) -> list[str]:
    found = [_of(rows, line, backend) for backend in backends]
    return [short(pick(mine, key=lambda row: row["bytes"])[key]) if mine else NONE for mine in found]


def _of(rows: Sequence[Facts], line: tuple[str, str], backend: str) -> list[Facts]:
    return [row for row in rows if (row["operation"], row["group"], row["backend"]) == (*line, backend)]


def every(rows: Sequence[Facts]) -> Table:
    """A line a row."""
    header = ["operation", "group", "backend", "size", "µs", "algorithm GB/s", "bus GB/s", "over gloo"]
    gloo = {(row["operation"], row["group"], row["bytes"]): row for row in rows if row["backend"] == "gloo"}
    body = []
    for row in rows:
        rival = gloo.get((row["operation"], row["group"], row["bytes"]))
        body.append([
            row["operation"], row["group"], row["backend"], words(row["bytes"]) if row["bytes"] else NONE,
            short(row["latency_us"]), short(row["algorithm_gb_per_s"]), short(row["bus_gb_per_s"]),
            NONE if rival is None or rival is row else f"{row['latency_us'] / rival['latency_us']:.2f} x",
        ])  # fmt: skip
    return Table(header, body, left=3)
