"""The report on strategies: table, notes, picture."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from harness.reports.figures import GREY, figure
from harness.reports.pages import settings
from harness.reports.report import MIB, Facts, Part, Report, machine, percent
from harness.reports.tables import NONE, Table, columns, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    "Images/s: a whole step with the global batch, median after a warm-up; the speed-up is over the first row. "
    "State: parameters, gradients and optimizer state; peak: the growth of a rank's memory in training; both of the "
    "rank that holds most. Sent: by a rank, on average, in an optimizer step. Hidden: the share of the time of "
    "communication in which the rank computed. Difference: to one process, the largest of a weight after 20 steps in "
    "float64, or for exact rows the bits in which the float32 weights differ."
)


def report(results: Facts, missing: Mapping[str, str]) -> Report:
    """Build the report from results.json's content and the reasons why strategies are missing."""
    config, rows = results["config"], results["rows"]
    net, data = (config[key]["class_path"].rpartition(".")[2] for key in ("net", "data"))
    header = {"Model": f"{net} on {data}", "Settings": "; ".join(settings(config)), **machine(results)}
    text: list[Part] = [table(rows), *notes(rows, missing)]
    image = "![speed, memory, bytes sent and differences](results.png)"
    return Report(header, text, [*text, image], {"results.png": picture(rows)})


def table(rows: Sequence[Facts]) -> Table:
    """One line a row."""
    cells = {
        "strategy": lambda row: row["strategy"],
        "devices": lambda row: str(row["devices"]),
        "images/s": lambda row: short(row["images_per_second"]),
        "speed-up": lambda row: f"{row['speedup']:.2f}",
        "state, MiB": lambda row: _mib(_largest(row["state_bytes_per_rank"])),
        "peak, MiB": lambda row: _mib(_largest(row["peak_memory_per_rank"])),
        "sent, MiB": lambda row: _mib(row["bytes_sent_per_step"]),
        "hidden, %": lambda row: percent(row["hidden_share"]),
        "difference": _difference,
    }
    return columns(cells, rows)


def _difference(row: Facts) -> str:
    """To one process: `0 bits`, `1.2e-15`."""
    value = row["max_difference"]
    if value is None:
        return "not finite"
    return f"{value} bits" if row["exact"] is not None else f"{value:.1e}" if value else "0"


def _largest(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _mib(size: float | None) -> str:
    if size is None:
        return NONE
    return "0" if not size else f"{size / MIB:.3g}" if size < 100 * MIB else f"{size / MIB:.0f}"


def notes(rows: Sequence[Facts], missing: Mapping[str, str]) -> list[str]:
    """Paragraphs below the table."""
    lines = [COLUMNS]
    if len({row["threads_per_rank"] for row in rows}) > 1:
        threads = ", ".join(f"{row['strategy']} {row['threads_per_rank']}" for row in rows)
        lines.append(
            f"Threads a rank differ, and the speed-up with them: {threads}. OMP_NUM_THREADS=1 makes them equal."
        )
    return [*lines, *(f"{name}: {reason}." for name, reason in missing.items())]


def picture(rows: Sequence[Facts]) -> bytes:
    """A PNG with a bar a row in each of four panels: speed-up, memory a rank, bytes sent, difference to one process."""
    with figure(13, max(3.2, 1.3 + 0.34 * len(rows))) as (drawn, png):
        panels = drawn.subplots(1, 4, sharey=True)
        for axes, draw in zip(panels, (_speed, _memory, _sent, _differences), strict=True):
            axes.grid(False, axis="y")
            draw(axes, rows)
        panels[0].set_yticks(range(len(rows)), [row["strategy"] for row in rows], parse_math=False)
        panels[0].set_ylim(len(rows) - 0.4, -0.6)
    return png.getvalue()


def _speed(axes: "Axes", rows: Sequence[Facts]) -> None:
    axes.barh(range(len(rows)), [row["speedup"] for row in rows], height=0.6, color="C0")
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1.2)
    for place, row in enumerate(rows):
        axes.annotate(f" {row['images_per_second']:,.0f}", (row["speedup"], place), va="center", fontsize=8)
    axes.margins(x=0.25)
    axes.set_title("speed-up over one process; images/s")


def _memory(axes: "Axes", rows: Sequence[Facts]) -> None:
    for key, shift, color, label in (("peak_memory", 0.15, "C7", "peak"), ("state_bytes", -0.15, "C1", "state")):
        values = [(_largest(row[f"{key}_per_rank"]) or 0) / MIB for row in rows]
        axes.barh([place + shift for place in range(len(rows))], values, height=0.3, color=color, label=label)
    axes.legend(loc="best")
    axes.set_title("MiB a rank")


def _sent(axes: "Axes", rows: Sequence[Facts]) -> None:
    axes.barh(range(len(rows)), [(row["bytes_sent_per_step"] or 0) / MIB for row in rows], height=0.6, color="C2")
    for place, row in enumerate(rows):
        if row["bytes_sent_per_step"] is None:
            axes.annotate(" not measured", (0, place), va="center", fontsize=8, color=GREY)
        elif row["hidden_share"] is not None:
            label = f" {100 * row['hidden_share']:.0f} % hidden"
            axes.annotate(label, (row["bytes_sent_per_step"] / MIB, place), va="center", fontsize=8)
    axes.margins(x=0.4)
    axes.set_title("MiB sent a step and rank")


def _differences(axes: "Axes", rows: Sequence[Facts]) -> None:
    """On a logarithmic axis; a 0 has no place on it and is written."""
    shown = [(place, row["max_difference"]) for place, row in enumerate(rows) if not row["exact"]]
    axes.scatter([value for _, value in shown if value], [place for place, value in shown if value], s=40, color="C3")
    axes.set_xscale("log")
    axes.set_xlim(1e-18, 10)
    for place, row in enumerate(rows):
        if row["exact"] or not row["max_difference"]:
            label = "not finite" if row["max_difference"] is None else f"{row['max_difference']:g}"
            label = f"{label} bits" if row["exact"] else label
            axes.annotate(label, (2e-18, place), va="center", fontsize=8)
    axes.set_title("largest difference of a weight")
