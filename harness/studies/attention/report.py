"""The study told: tables on the terminal, results.md with every row, pictures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.reports.tables import NONE, Table, listed, paragraph, short
from harness.runs.files import write_bytes, write_text
from harness.studies.attention import picture
from harness.studies.hardware.report import words

Facts = dict[str, Any]
MIB = 2**20
KERNELS = (
    "Kernels by themselves, causal. µs: median time of a call, by torch.utils.benchmark; auto names the kernel that "
    "torch takes by itself. TFLOP/s of the fastest, and their share of the peak."
)
BLOCKS = (
    "The block of self-attention with its projections, without a mask, µs a call. Half of the dense batch's tokens are "
    "padding, which jagged texts don't have; a single text is cut in half."
)
TUTORIAL = (
    "The shapes of PyTorch's tutorial on scaled dot product attention, without a mask, and the figures it prints, in "
    "float16 on a GPU of its own."
)
OPERATORS = "The ten operators that take longest by themselves in 25 calls of the causal block, {what}: µs a call."
COUNTED = (
    "Operations: of attention 4 T² D forward, half of it if causal, 2.5 times as many backward (FlashAttention-2, "
    "section 4.1); of projections 8 T D², twice as many backward. Padding is counted. Peak, MiB: what a call that is "
    "not the first takes beyond its inputs and weights."
)
ABOVE = (
    "A share above 100 %: the kernel was faster than torch's product of matrices of that type, as where the processor "
    "has none for it (float16 on many CPUs) and the kernel converts inside."
)
DRAWN = {
    "kernels": "what each kernel reaches against the length of texts",
    "blocks": "dense and jagged, eager and compiled",
}


def text(results: Facts, missing: Mapping[str, str]) -> str:
    """The tables for a terminal.

    Args:
        results: the content of results.json.
        missing: names of rows that were left out or failed, and why.
    """
    rows = results["rows"]
    told = [f"{table.plain()}\n\n{paragraph(note)}" for note, table in tables(rows)]
    return "\n\n".join([paragraph(peaks(results)), *told, *map(paragraph, notes(rows, missing))])


def save(folder: Path, results: Facts, missing: Mapping[str, str]) -> None:
    """Write results.md, and a picture of the kernels and of the blocks.

    Raises:
        OSError: the folder can't be written.
    """
    there = {part: timed(results["rows"], part) for part in DRAWN}
    draw = {"kernels": picture.kernels, "blocks": picture.blocks}
    drawn = {part: f"![{DRAWN[part]}]({part}.png)" for part, rows in there.items() if rows}
    for part in drawn:
        write_bytes(folder / f"{part}.png", draw[part](there[part], results["peak"]["tflops_per_second"]))
    write_text(folder / "results.md", markdown(results, missing, drawn))


def markdown(results: Facts, missing: Mapping[str, str], drawn: Mapping[str, str]) -> str:
    """results.md: what was measured on what, the tables, the pictures, every row."""
    rows = results["rows"]
    header = "\n".join(f"- {name}: {words(results[name.lower()])}" for name in ("Hardware", "Versions"))
    told = [part for note, table in tables(rows) for part in (note, table.markdown())]
    parts = ["# attention", header, peaks(results), *told, *notes(rows, missing), *drawn.values()]
    return "\n\n".join([*parts, "## All rows", every(rows).markdown()]) + "\n"


def tables(rows: Sequence[Facts]) -> list[tuple[str, Table]]:
    """What a table is, and the table."""
    made: list[tuple[str, str, Callable[[Sequence[Facts]], Table]]] = [
        ("kernels", KERNELS, kernels), ("blocks", BLOCKS, blocks), ("tutorial", TUTORIAL, tutorial),
    ]  # fmt: skip
    found = [(note, make(_of(rows, part))) for part, note, make in made if timed(rows, part)]
    profiled = timed(rows, "profile")
    return found + [(OPERATORS.format(what=_what(row)), operators(row)) for row in profiled]


def _of(rows: Sequence[Facts], part: str) -> list[Facts]:
    return [row for row in rows if row["part"] == part]


def timed(rows: Sequence[Facts], part: str) -> list[Facts]:
    """Those of a part that ran."""
    return [row for row in _of(rows, part) if row["refused"] is None]


# Tables


def kernels(rows: Sequence[Facts]) -> Table:
    """A line for a type, a direction and a length; a column a kernel that ran at all."""
    backends = list(dict.fromkeys(row["backend"] for row in rows if row["refused"] is None))
    header = ["type", "pass", "texts", f"µs: {backends[0]}", *backends[1:], "fastest", "TFLOP/s", "share, %"]
    body = []
    for line in dict.fromkeys(_line(row) for row in rows):
        mine = {row["backend"]: row for row in rows if _line(row) == line}
        ran = [row for row in mine.values() if row["refused"] is None]
        if ran:
            best = min(ran, key=lambda row: row["microseconds"])
            cells = [_microseconds(mine.get(name), name == "auto") for name in backends]
            body.append([*line, *cells, best["kernel"], short(best["tflops_per_second"]), _percent(best)])
    return Table(header, body, left=3)


def _line(row: Facts) -> tuple[str, str, str]:
    return row["dtype"], "+ backward" if row["backward"] else "forward", f"{row['batch']} x {row['length']}"


def _microseconds(row: Facts | None, with_kernel: bool = False) -> str:
    if row is None or row["refused"] is not None:
        return NONE
    return f"{short(row['microseconds'])}{' ' + row['kernel'] if with_kernel else ''}"


def _percent(row: Facts) -> str:
    return NONE if row["share_of_peak"] is None else f"{100 * row['share_of_peak']:.0f}"


def blocks(rows: Sequence[Facts]) -> Table:
    """A line for a type, a direction and a length; a column for dense and jagged, eager and compiled."""
    kinds = list(dict.fromkeys(_what(row) for row in rows))
    body = []
    for line in dict.fromkeys(_line(row) for row in rows):
        mine = {_what(row): row for row in rows if _line(row) == line}
        body.append([*line, *(_microseconds(mine.get(kind), with_kernel=True) for kind in kinds)])
    return Table(["type", "pass", "texts", f"µs: {kinds[0]}", *kinds[1:]], body, left=3)


def _what(row: Facts) -> str:
    return row["name"].partition(": ")[2].partition(",")[0]


def tutorial(rows: Sequence[Facts]) -> Table:
    """A line a row, with the tutorial's figure."""
    header = ["row", "texts", "type", "kernel", "µs", "tutorial's", "TFLOP/s", "share, %", "peak, MiB"]
    body = [
        [
            f"{'block' if row['block'] else 'kernel'} {row['heads']} x {row['head_dim']}, {_what(row)}",
            f"{row['batch']} x {row['length']}", row["dtype"], row.get("kernel", NONE), _microseconds(row),
            short(row["tutorial_us"]), short(row.get("tflops_per_second")), _percent(row), _mib(row),
        ]
        for row in rows
    ]  # fmt: skip
    return Table(header, body, left=4)


def _mib(row: Facts) -> str:
    return NONE if row.get("peak_bytes") is None else short(row["peak_bytes"] / MIB)


def operators(row: Facts) -> Table:
    """The heaviest of a profiled row."""
    body = [
        [each["operator"], short(each["microseconds"]), short(each["calls"]), f"{100 * each['share']:.1f}"]
        for each in row["operators"]
    ]
    return Table(["operator", "µs", "times", "share, %"], body)


def every(rows: Sequence[Facts]) -> Table:
    """A line a row that ran."""
    header = ["row", "kernel", "µs", "± iqr / 2", "TFLOP/s", "share, %", "peak, MiB"]
    body = [
        [
            row["name"], row["kernel"], _microseconds(row), short(row["iqr_microseconds"] / 2),
            short(row["tflops_per_second"]), _percent(row), _mib(row),
        ]
        for row in rows
        if row["part"] != "matmul" and row["refused"] is None
    ]  # fmt: skip
    return Table(header, body, left=2)


# What stands beneath


def peaks(results: Facts) -> str:
    """What the peak is, of which shares are told."""
    told = []
    for dtype, peak in results["peak"]["tflops_per_second"].items():
        reached = {row["tflops_per_second"]: row for row in _of(results["rows"], "matmul") if row["dtype"] == dtype}
        size, count = f"{reached[peak]['matrix']} x {reached[peak]['matrix']}", len(reached)
        told.append(f"{short(peak)} in {dtype} ({size}, the best of {count} from {short(min(reached))} on)")
    return f"Peak in TFLOP/s: {listed(told) or NONE}; {results['peak']['is']}."


def notes(rows: Sequence[Facts], missing: Mapping[str, str]) -> list[str]:
    """How operations are counted; what can't be run here, with torch's reason; what was left out or failed."""
    told = [COUNTED]
    if any((row.get("share_of_peak") or 0) > 1 for row in rows):
        told.append(ABOVE)
    return [*told, *refusals(rows), *_grouped(missing)]


def _grouped(missing: Mapping[str, str]) -> list[str]:
    """A line a reason."""
    names: dict[str, list[str]] = {}
    for name, reason in missing.items():
        names.setdefault(reason, []).append(name)
    return [f"{'; '.join(each)}: {reason}." for reason, each in names.items()]


def refusals(rows: Sequence[Facts]) -> list[str]:
    """What torch refuses, a line a reason."""
    by_reason: dict[str, list[Facts]] = {}
    for row in rows:
        if row.get("refused"):
            by_reason.setdefault(row["refused"], []).append(row)
    return [f"Not run: {_named(refused)}: {reason.rstrip('.')}." for reason, refused in by_reason.items()]


def _named(rows: Sequence[Facts]) -> str:
    if len(rows) == 1:
        return rows[0]["name"]
    kinds = listed(list(dict.fromkeys(f"{row['part']}: {_what(row)}" for row in rows)))
    dtypes = listed(list(dict.fromkeys(row["dtype"] for row in rows)))
    return f"{kinds} in {dtypes}, {len(rows)} rows"
