"""The rows told: a table on the terminal, results.md, results.png, results.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.reports.pages import settings
from harness.reports.tables import NONE, Table, paragraph, short
from harness.runs.files import write_bytes, write_text
from harness.studies.hardware.picture import picture

Facts = dict[str, Any]
MIB = 2**20
COLUMNS = (
    "Images/s: a whole step with the global batch, median after a warm-up; the speed-up is over the first row. "
    "State: parameters, gradients and optimizer state; peak: the growth of a rank's memory in training; both of the "
    "rank that holds most. Sent: by a rank, on average, in an optimizer step. Hidden: the share of the time of "
    "communication in which the rank computed. Difference: to one process, the largest of a weight after 20 steps in "
    "float64, or for exact rows the bits in which the float32 weights differ."
)


def text(results: Facts, missing: Mapping[str, str]) -> str:
    """The table for a terminal, and beneath it what its columns are and which rows are missing.

    Args:
        results: the content of results.json.
        missing: strategies that are not in the table, and why.
    """
    return "\n\n".join([table(results["rows"]).plain(), *map(paragraph, notes(results["rows"], missing))])


def save(folder: Path, results: Facts, missing: Mapping[str, str]) -> None:
    """Write results.md and results.png.

    Raises:
        OSError: the folder can't be written.
    """
    write_text(folder / "results.md", markdown(results, missing))
    write_bytes(folder / "results.png", picture(results["rows"]))


def markdown(results: Facts, missing: Mapping[str, str]) -> str:
    """results.md: what was measured on what, the table, the notes, the picture."""
    config = results["config"]
    told = {
        "Model": f"{_class(config, 'net')} on {_class(config, 'data')}",
        "Settings": "; ".join(settings(config)),
        "Hardware": words(results["hardware"]),
        "Versions": words(results["versions"]),
    }
    header = "\n".join(f"- {name}: {value}" for name, value in told.items())
    image = "![speed, memory, bytes sent and differences](results.png)"
    parts = ["# hardware", header, table(results["rows"]).markdown(), *notes(results["rows"], missing), image]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Facts]) -> Table:
    """One line a row."""
    header = [
        "strategy", "devices", "images/s", "speed-up", "state, MiB", "peak, MiB", "sent, MiB", "hidden, %",
        "difference",
    ]  # fmt: skip
    return Table(header, [_cells(row) for row in rows])


def _cells(row: Facts) -> list[str]:
    sent, hidden = row["bytes_sent_per_step"], row["hidden_share"]
    return [
        row["strategy"],
        str(row["devices"]),
        short(row["images_per_second"]),
        f"{row['speedup']:.2f}",
        _mib(_largest(row["state_bytes_per_rank"])),
        _mib(_largest(row["peak_memory_per_rank"])),
        _mib(sent),
        NONE if hidden is None else f"{100 * hidden:.0f}",
        difference(row),
    ]


def difference(row: Facts) -> str:
    """To one process: `0 bits`, `1.2e-15`."""
    value = row["max_difference"]
    if value is None:
        return "not finite"
    return f"{value} bits" if row["exact"] is not None else f"{value:.1e}" if value else "0"


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mib(size: float | None) -> str:
    return (
        NONE if size is None else "0" if not size else f"{size / MIB:.3g}" if size < 100 * MIB else f"{size / MIB:.0f}"
    )


def notes(rows: Sequence[Facts], missing: Mapping[str, str]) -> list[str]:
    """What stands beneath the table."""
    lines = [COLUMNS]
    if len({row["threads_per_rank"] for row in rows}) > 1:
        threads = ", ".join(f"{row['strategy']} {row['threads_per_rank']}" for row in rows)
        lines.append(
            f"Threads a rank differ, and the speed-up with them: {threads}. OMP_NUM_THREADS=1 makes them equal."
        )
    return [*lines, *(f"{name}: {reason}." for name, reason in missing.items())]


def _class(config: Facts, key: str) -> str:
    return config[key]["class_path"].rpartition(".")[2]


def words(values: Mapping[str, Any]) -> str:
    """Names with their values, but for those that are not known."""
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
