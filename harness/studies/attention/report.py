"""The report on attention: tables, notes, every row, pictures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from harness.reports.report import MIB, Facts, Part, Report, machine, percent
from harness.reports.tables import NONE, Table, columns, listed, short
from harness.studies.attention import figures
from harness.studies.attention.figures import what

T = TypeVar("T")
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
IMAGES = {
    "kernels": "![what each kernel reaches against the length of texts](kernels.png)",
    "blocks": "![dense and jagged, eager and compiled](blocks.png)",
}


def report(results: Facts, missing: Mapping[str, str]) -> Report:
    """Build the report from results.json's content and the reasons why cases are missing."""
    rows, noted, said = results["rows"], notes(results["rows"], missing), peaks(results)
    found = tables(rows)
    draw = {"kernels": figures.kernels, "blocks": figures.blocks}
    timed = {part: mine for part in draw if (mine := ran(rows, part))}
    pngs = {f"{part}.png": draw[part](mine, results["peak"]["tflops_per_second"]) for part, mine in timed.items()}
    text: list[Part] = [said, *(part for note, table in found for part in (table, note)), *noted]
    page: list[Part] = [said, *(part for note, table in found for part in (note, table)), *noted]
    page += [*(IMAGES[part] for part in timed), "## All rows", every(rows)]
    return Report(machine(results), text, page, pngs)


def tables(rows: Sequence[Facts]) -> list[tuple[str, Table]]:
    """Notes on the tables, with the tables."""
    made = {"kernels": (KERNELS, kernels), "blocks": (BLOCKS, blocks), "tutorial": (TUTORIAL, tutorial)}
    found = [(note, make(_of(rows, part))) for part, (note, make) in made.items() if ran(rows, part)]
    return found + [(OPERATORS.format(what=what(row)), operators(row)) for row in ran(rows, "profile")]


def _of(rows: Sequence[Facts], part: str) -> list[Facts]:
    return [row for row in rows if row["part"] == part]


def ran(rows: Sequence[Facts], part: str) -> list[Facts]:
    """Rows of a part that torch did not refuse."""
    return [row for row in _of(rows, part) if row["refused"] is None]


# Tables


def kernels(rows: Sequence[Facts]) -> Table:
    """A line for a type, a direction and a length; a column a kernel that ran at all."""
    backends = list(dict.fromkeys(row["backend"] for row in rows if row["refused"] is None))
    header = ["type", "pass", "texts", f"µs: {backends[0]}", *backends[1:], "fastest", "TFLOP/s", "share, %"]
    body = []
    for line in dict.fromkeys(_line(row) for row in rows):
        mine = {row["backend"]: row for row in rows if _line(row) == line}
        if ran := [row for row in mine.values() if row["refused"] is None]:
            best = min(ran, key=lambda row: row["microseconds"])
            cells = [_microseconds(mine.get(name), name == "auto") for name in backends]
            cells += [best["kernel"], short(best["tflops_per_second"]), percent(best["share_of_peak"])]
            body.append([*line, *cells])
    return Table(header, body, left=3)


def _line(row: Facts) -> tuple[str, str, str]:
    return row["dtype"], "+ backward" if row["backward"] else "forward", f"{row['batch']} x {row['length']}"


def _microseconds(row: Facts | None, with_kernel: bool = False) -> str:
    if row is None or row["refused"] is not None:
        return NONE
    return f"{short(row['microseconds'])}{' ' + row['kernel'] if with_kernel else ''}"


def blocks(rows: Sequence[Facts]) -> Table:
    """A line for a type, a direction and a length; a column for dense and jagged, eager and compiled."""
    kinds = list(dict.fromkeys(what(row) for row in rows))
    body = []
    for line in dict.fromkeys(_line(row) for row in rows):
        mine = {what(row): row for row in rows if _line(row) == line}
        body.append([*line, *(_microseconds(mine.get(kind), with_kernel=True) for kind in kinds)])
    return Table(["type", "pass", "texts", f"µs: {kinds[0]}", *kinds[1:]], body, left=3)


def tutorial(rows: Sequence[Facts]) -> Table:
    """A line a row, with the tutorial's figure."""
    cells = {
        "row": lambda r: f"{'block' if r['block'] else 'kernel'} {r['heads']} x {r['head_dim']}, {what(r)}",
        "texts": lambda row: f"{row['batch']} x {row['length']}",
        "type": lambda row: row["dtype"],
        "kernel": lambda row: row.get("kernel", NONE),
        "µs": _microseconds,
        "tutorial's": lambda row: short(row["tutorial_us"]),
        **REACHED,
    }
    return columns(cells, rows, left=4)


def _mib(row: Facts) -> str:
    return NONE if row.get("peak_bytes") is None else short(row["peak_bytes"] / MIB)


REACHED: dict[str, Callable[[Facts], str]] = {
    "TFLOP/s": lambda row: short(row.get("tflops_per_second")),
    "share, %": lambda row: percent(row["share_of_peak"]),
    "peak, MiB": _mib,
}


def operators(row: Facts) -> Table:
    """The heaviest operators of a profiled row."""
    cells = {
        "operator": lambda each: each["operator"],
        "µs": lambda each: short(each["microseconds"]),
        "times": lambda each: short(each["calls"]),
        "share, %": lambda each: f"{100 * each['share']:.1f}",
    }
    return columns(cells, row["operators"])


def every(rows: Sequence[Facts]) -> Table:
    """A line a row that ran."""
    cells = {
        "row": lambda row: row["name"],
        "kernel": lambda row: row["kernel"],
        "µs": _microseconds,
        "± iqr / 2": lambda row: short(row["iqr_microseconds"] / 2),
        **REACHED,
    }
    return columns(cells, [row for row in rows if row["part"] != "matmul" and row["refused"] is None], left=2)


# Notes


def peaks(results: Facts) -> str:
    """The peak of each type, and how it was found."""
    lines = []
    for dtype, peak in results["peak"]["tflops_per_second"].items():
        reached = {row["tflops_per_second"]: row for row in _of(results["rows"], "matmul") if row["dtype"] == dtype}
        size, count = f"{reached[peak]['matrix']} x {reached[peak]['matrix']}", len(reached)
        lines.append(f"{short(peak)} in {dtype} ({size}, the best of {count} from {short(min(reached))} on)")
    return f"Peak in TFLOP/s: {listed(lines) or NONE}; {results['peak']['is']}."


def notes(rows: Sequence[Facts], missing: Mapping[str, str]) -> list[str]:
    """How operations are counted; what torch refuses here; what was left out or failed."""
    above = [ABOVE] if any((row.get("share_of_peak") or 0) > 1 for row in rows) else []
    absent = [f"{'; '.join(names)}: {why}." for why, names in _grouped(missing.items())]
    return [COUNTED, *above, *refusals(rows), *absent]


def refusals(rows: Sequence[Facts]) -> list[str]:
    """What torch refuses, a line a reason."""
    by_reason = _grouped((row, row["refused"]) for row in rows if row.get("refused"))
    return [f"Not run: {_named(refused)}: {reason.rstrip('.')}." for reason, refused in by_reason]


def _grouped(reasons: Iterable[tuple[T, str]]) -> Iterable[tuple[str, list[T]]]:
    """Values by reason, in order."""
    groups: dict[str, list[T]] = {}
    for value, reason in reasons:
        groups.setdefault(reason, []).append(value)
    return groups.items()


def _named(rows: Sequence[Facts]) -> str:
    if len(rows) == 1:
        return rows[0]["name"]
    kinds = listed(list(dict.fromkeys(f"{row['part']}: {what(row)}" for row in rows)))
    dtypes = listed(list(dict.fromkeys(row["dtype"] for row in rows)))
    return f"{kinds} in {dtypes}, {len(rows)} rows"
