"""The report on strategies: table, notes, picture."""

from collections.abc import Mapping, Sequence
from typing import Literal

from harness.reports.figures import GREY, Axes, figure
from harness.reports.report import MIB, Part, Report, machine, percent
from harness.reports.settings import settings
from harness.reports.tables import NONE, Table, columns, short
from harness.studies.study import StudyHeader
from lab.studies.hardware.measure import StrategyTiming

COLUMNS = (
    "Images/s: a whole step with the global batch, median after a warm-up; the speed-up is over the first row. "
    "State: parameters, gradients and optimizer state; peak: the growth of a rank's memory in training; both of the "
    "rank that holds most. Sent: by a rank, on average, in an optimizer step. Hidden: the share of the time of "
    "communication in which the rank computed. Both are left out for RPC, which sends through shared memory too. "
    "Difference: to one process, the largest of a weight or statistic in float64, or for exact rows the bits that "
    "differ in float32. Training enlarges what rounding begins, in deep nets by many orders of magnitude in 20 steps."
)


def report(header: StudyHeader, rows: Sequence[StrategyTiming], missing: Mapping[str, str]) -> Report:
    """Build the report from results.json's content and the reasons why strategies are missing."""
    config = header["config"]
    net, data = (config[key]["class_path"].rpartition(".")[2] for key in ("net", "data"))
    text_of_settings = "; ".join(settings(config, header["free"]))
    lines = {"Model": f"{net} on {data}", "Settings": text_of_settings, **machine(header)}
    text: list[Part] = [table(rows), COLUMNS]
    if len({row["threads_per_rank"] for row in rows}) > 1:
        threads = ", ".join(f"{row['strategy']} {row['threads_per_rank']}" for row in rows)
        advice = "OMP_NUM_THREADS=1 makes them equal."
        text.append(f"Threads a rank differ, and the speed-up with them: {threads}. {advice}")
    text += [f"{name}: {reason}." for name, reason in missing.items()]
    image = "![speed, memory, bytes sent and differences](results.png)"
    return Report(lines, text, [*text, image], {"results.png": picture(rows)})


def table(rows: Sequence[StrategyTiming]) -> Table:
    """Make a table with a line for each row."""
    cells = {
        "strategy": lambda row: row["strategy"],
        "devices": lambda row: str(row["devices"]),
        "images/s": lambda row: short(row["images_per_second"]),
        "speed-up": lambda row: f"{row['speedup']:.2f}",
        "state, MiB": lambda row: _mib(row["state_bytes_per_rank"]),
        "peak, MiB": lambda row: _mib(row["peak_memory_per_rank"]),
        "sent, MiB": lambda row: _mib([row["bytes_sent_per_step"]]),
        "hidden, %": lambda row: percent(row["hidden_share"]),
        "difference, 1 step": lambda row: _difference(row, "first_difference", ".1e"),
        "20 steps": lambda row: _difference(row, "max_difference", ".1e"),
    }
    return columns(cells, rows)


def _difference(row: StrategyTiming, key: Literal["first_difference", "max_difference"], style: str) -> str:
    """State how far a row is from one process: `0 bits`, `1.2e-15`."""
    value = row[key]
    if value is None:
        return "not finite"
    return f"{value} bits" if row["exact"] is not None else f"{value:{style}}" if value else "0"


def _mib(sizes: Sequence[float | None]) -> str:
    """Return the largest size in MiB."""
    largest = max((size / MIB for size in sizes if size is not None), default=None)
    if largest is None:
        return NONE
    return f"{largest:.3g}" if largest < 100 else f"{largest:.0f}"


def picture(rows: Sequence[StrategyTiming]) -> bytes:
    """Draw a bar for each row in four panels: speed-up, memory a rank, bytes sent, difference to one process."""
    with figure(13, max(3.2, 1.3 + 0.34 * len(rows))) as (canvas, png):
        speed, memory, sent, differences = panels = canvas.subplots(1, 4, sharey=True)
        for axes in panels:
            axes.grid(False, axis="y")
        speed.set_yticks(range(len(rows)), [row["strategy"] for row in rows], parse_math=False)
        speed.set_ylim(len(rows) - 0.4, -0.6)
        speed.set_title("speed-up over one process; images/s")
        speed.axvline(1, color=GREY, linestyle="--", linewidth=1.2)
        speeds = [f"{row['images_per_second']:,.0f}" for row in rows]
        _bars(speed, [row["speedup"] for row in rows], speeds, margin=0.25, color="C0")
        _memory(memory, rows)
        sent.set_title("MiB sent a step and rank")
        sizes = [row["bytes_sent_per_step"] for row in rows]
        hidden = ["" if row["hidden_share"] is None else f"{percent(row['hidden_share'])} % hidden" for row in rows]
        labels = ["not measured" if size is None else label for size, label in zip(sizes, hidden, strict=True)]
        _bars(sent, [(size or 0) / MIB for size in sizes], labels, margin=0.4, color="C2")
        _differences(differences, rows)
    return png.getvalue()


def _bars(axes: Axes, values: Sequence[float], labels: Sequence[str], margin: float, color: str) -> None:
    axes.barh(range(len(values)), values, height=0.6, color=color)
    for place, label in enumerate(labels):
        axes.annotate(f" {label}", (values[place], place), va="center", fontsize=8)
    axes.margins(x=margin)


def _memory(axes: Axes, rows: Sequence[StrategyTiming]) -> None:
    peaks = [[size or 0 for size in row["peak_memory_per_rank"]] for row in rows]
    states = [row["state_bytes_per_rank"] for row in rows]
    for sizes, shift, color, label in ((peaks, 0.15, "C7", "peak"), (states, -0.15, "C1", "state")):
        values = [max(by_rank) / MIB for by_rank in sizes]
        axes.barh([place + shift for place in range(len(rows))], values, height=0.3, color=color, label=label)
    axes.legend(loc="best")
    axes.set_title("MiB a rank")


def _differences(axes: Axes, rows: Sequence[StrategyTiming]) -> None:
    """Draw differences on a logarithmic axis; write a 0, as it has no place there."""
    axes.set_title("largest difference of a weight")
    axes.set_xscale("log")
    axes.set_xlim(1e-18, 1e4)
    first, last = ([row["first_difference"] for row in rows], [row["max_difference"] for row in rows])
    for label, values, color in (("1 step", first, "C1"), ("20 steps", last, "C3")):
        places = [place for place, row in enumerate(rows) if values[place] and row["exact"] is None]
        axes.scatter([values[place] for place in places], places, s=40, color=color, label=label)
    for place, row in enumerate(rows):
        if row["exact"] or not row["max_difference"]:
            axes.annotate(_difference(row, "max_difference", "g"), (2e-18, place), va="center", fontsize=8)
    axes.legend(loc="best")
