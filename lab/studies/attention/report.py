"""The report on attention: tables, notes, every row, and pictures of kernels and of the block."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from harness.reports.figures import GREY, figure
from harness.reports.report import MIB, Part, Report, machine, percent
from harness.reports.tables import NONE, Table, columns, join_words, short
from harness.studies.study import StudyHeader
from lab.studies.attention.measure import CallTiming

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
BAR = 0.2  # width
KERNELS = (
    "Kernels by themselves, causal. µs: median time of a call, by torch.utils.benchmark; auto names the kernel that "
    "torch takes by itself. TFLOP/s of the fastest, and their share of the peak."
)
BLOCKS = (
    "The block of self-attention with its projections, without a mask, µs a call. Half of the dense batch's tokens are "
    "padding, which jagged texts don't have; a single text is cut in half."
)
LAYERS = (
    "Our layers beside torch's of the same function, without a mask, µs a call: SelfAttention and MultiheadAttention; "
    "Block and TransformerEncoderLayer (norm first, GELU), which have an MLP, too. Forward is in eval mode without "
    "gradients, where torch's take a path of their own."
)
TUTORIAL = (
    "The shapes of PyTorch's tutorial on scaled dot product attention, without a mask, and the figures it prints, in "
    "float16 on a GPU of its own."
)
OPERATORS = "The ten operators that take longest by themselves in 25 calls of the causal block, {what}: µs a call."
COUNTED = (
    "Operations: of attention 4 T² D forward, half of it if causal, 2.5 times as many backward (FlashAttention-2, "
    "section 4.1); of projections 8 T D², with an MLP 24 T D², twice as many backward. Padding is counted. Peak, MiB: "
    "what a call that is not the first takes beyond its inputs and weights."
)
ABOVE = (
    "A share above 100 %: the kernel was faster than torch's product of matrices of that type, as where the processor "
    "has none for it (float16 on many CPUs) and the kernel converts inside."
)
IMAGES = {
    "kernels": "![what each kernel reaches against the length of texts](kernels.png)",
    "blocks": "![dense and jagged, eager and compiled](blocks.png)",
}


def report(header: StudyHeader, rows: Sequence[CallTiming], missing: Mapping[str, str]) -> Report:
    """Build the report from results.json's content and the reasons why cases are missing."""
    by_part = group_by(rows, lambda row: row["part"])
    ran = group_by((row for row in rows if row["refused"] is None), lambda row: row["part"])
    functions = {
        "kernels": (KERNELS, kernels),
        "blocks": (BLOCKS, blocks),
        "layers": (LAYERS, blocks),
        "tutorial": (TUTORIAL, tutorial),
    }
    tables = [(note, table(by_part[part])) for part, (note, table) in functions.items() if part in ran]
    tables += [(OPERATORS.format(what=kind_of(row)), operators(row)) for row in ran.get("profile", ())]
    peaks = header["peak"]["tflops_per_second"]
    pictures = {part: draw(ran[part], peaks) for part, draw in PICTURES.items() if part in ran}
    first, last = describe_peaks(header, rows), notes(rows, missing)
    text: list[Part] = [first, *(part for note, table in tables for part in (table, note)), *last]
    page: list[Part] = [first, *(part for pair in tables for part in pair), *last]
    page += [*(IMAGES[part] for part in pictures), "## All rows", all_rows(rows)]
    return Report(machine(header), text, page, {f"{part}.png": png for part, png in pictures.items()})


def group_by(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the values of each key, in order."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def kind_of(row: CallTiming) -> str:
    """Return a name's middle: `flash`, `dense compiled`, `jagged eager`."""
    return row["name"].partition(": ")[2].partition(",")[0]


# Tables


def kernels(rows: Sequence[CallTiming]) -> Table:
    """Make a table with a line for a type, a direction and a length, and a column for a kernel that ran at all."""
    backends = list(dict.fromkeys(row["backend"] for row in rows if row["refused"] is None))
    header = ["type", "pass", "texts", f"µs: {backends[0]}", *backends[1:], "fastest", "TFLOP/s", "share, %"]
    body = []
    for line, line_rows in group_by(rows, _line).items():
        if ran := {row["backend"]: row for row in line_rows if row["refused"] is None}:
            best = min(ran.values(), key=lambda row: row["microseconds"])
            cells = [_microseconds(ran.get(name), name == "auto") for name in backends]
            cells += [best["kernel"], short(best["tflops_per_second"]), percent(best["share_of_peak"])]
            body.append([*line, *cells])
    return Table(header, body, left=3)


def _line(row: CallTiming) -> tuple[str, str, str]:
    return row["dtype"], "+ backward" if row["backward"] else "forward", f"{row['batch']} x {row['length']}"


def _microseconds(row: CallTiming | None, with_kernel: bool = False) -> str:
    if row is None or row["refused"] is not None:
        return NONE
    return f"{short(row['microseconds'])}{' ' + row['kernel'] if with_kernel else ''}"


def blocks(rows: Sequence[CallTiming]) -> Table:
    """Make a table with a line for a type, a direction and a length, and a column for a layout or layer and a mode."""
    kinds = list(dict.fromkeys(kind_of(row) for row in rows))
    body = []
    for line, line_rows in group_by(rows, _line).items():
        by_kind = {kind_of(row): row for row in line_rows}
        body.append([*line, *(_microseconds(by_kind.get(kind), with_kernel=True) for kind in kinds)])
    return Table(["type", "pass", "texts", f"µs: {kinds[0]}", *kinds[1:]], body, left=3)


def tutorial(rows: Sequence[CallTiming]) -> Table:
    """Make a table with a line for each row, and the tutorial's figure."""
    cells = {
        "row": lambda r: f"{'block' if r['block'] else 'kernel'} {r['heads']} x {r['head_dim']}, {kind_of(r)}",
        "texts": lambda row: f"{row['batch']} x {row['length']}",
        "type": lambda row: row["dtype"],
        "kernel": lambda row: row.get("kernel", NONE),
        "µs": _microseconds,
        "tutorial's": lambda row: short(row["tutorial_us"]),
        **REACHED,
    }
    return columns(cells, rows, left=4)


REACHED: dict[str, Callable[[CallTiming], str]] = {
    "TFLOP/s": lambda row: short(row.get("tflops_per_second")),
    "share, %": lambda row: percent(row["share_of_peak"]),
    "peak, MiB": lambda row: NONE if (peak := row.get("peak_bytes")) is None else short(peak / MIB),
}


def operators(row: CallTiming) -> Table:
    """Make a table of the heaviest operators of a profiled row."""
    cells = {
        "operator": lambda operator: operator["operator"],
        "µs": lambda operator: short(operator["microseconds"]),
        "times": lambda operator: short(operator["calls"]),
        "share, %": lambda operator: f"{100 * operator['share']:.1f}",
    }
    return columns(cells, row["operators"])


def all_rows(rows: Sequence[CallTiming]) -> Table:
    """Make a table with a line for each row that ran."""
    cells = {
        "row": lambda row: row["name"],
        "kernel": lambda row: row["kernel"],
        "µs": _microseconds,
        "± iqr / 2": lambda row: short(row["iqr_microseconds"] / 2),
        **REACHED,
    }
    return columns(cells, [row for row in rows if row["part"] != "matmul" and row["refused"] is None], left=2)


# Notes


def describe_peaks(header: StudyHeader, rows: Sequence[CallTiming]) -> str:
    """State the peak of each type, and how it was measured."""
    lines = []
    products = [row for row in rows if row["part"] == "matmul"]
    for dtype, peak in header["peak"]["tflops_per_second"].items():
        matrices = {row["tflops_per_second"]: row["matrix"] for row in products if row["dtype"] == dtype}
        size = f"{matrices[peak]} x {matrices[peak]}"
        lines.append(f"{short(peak)} in {dtype} ({size}, the best of {len(matrices)} from {short(min(matrices))} on)")
    return f"Peak in TFLOP/s: {join_words(lines) or NONE}; {header['peak']['is']}."


def notes(rows: Sequence[CallTiming], missing: Mapping[str, str]) -> list[str]:
    """State how operations are counted, what torch refuses here, and what was left out or failed."""
    above = [ABOVE] if any((row.get("share_of_peak") or 0) > 1 for row in rows) else []
    absent = [f"{'; '.join(names)}: {why}." for why, names in group_by(missing, missing.__getitem__).items()]
    return [COUNTED, *above, *refusals(rows), *absent]


def refusals(rows: Sequence[CallTiming]) -> list[str]:
    """State what torch refuses, in a line for each reason."""
    lines = []
    for reason, refused in group_by(rows, lambda row: row["refused"]).items():
        if not reason:
            continue
        kinds = join_words(list(dict.fromkeys(f"{row['part']}: {kind_of(row)}" for row in refused)))
        dtypes = join_words(list(dict.fromkeys(row["dtype"] for row in refused)))
        cases = f"{kinds} in {dtypes}, {len(refused)} rows" if len(refused) > 1 else refused[0]["name"]
        lines.append(f"Not run: {cases}: {reason.rstrip('.')}.")
    return lines


# Pictures


def draw_kernels(rows: Sequence[CallTiming], peaks: Mapping[str, float]) -> bytes:
    """Draw TFLOP/s against length: a panel for a type and direction, a line for a kernel, dashed the peak."""
    names = list(dict.fromkeys(row["backend"] for row in rows))
    with figure() as (canvas, png):
        for axes, dtype, panel_rows in _panels(canvas, rows, "tokens of a text", "TFLOP/s"):
            for number, name in enumerate(names):
                points = sorted(
                    (row["length"], row["tflops_per_second"]) for row in panel_rows if row["backend"] == name
                )
                if points:
                    # Wide and pale: auto lies on the line of the kernel that it takes
                    look: dict[str, Any] = {"linewidth": 5, "alpha": 0.3} if name == "auto" else {"linewidth": 1.2}
                    axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", markersize=3, label=name, **look)
            if dtype in peaks:
                axes.axhline(peaks[dtype], color=GREY, linestyle="--", linewidth=1, label="product of matrices")
            lengths = sorted({row["length"] for row in panel_rows})
            axes.set_xscale("log")
            axes.set_xticks(lengths, [str(length) for length in lengths], fontsize=7)
            axes.minorticks_off()
            axes.set_ylim(0)
    return png.getvalue()


def draw_blocks(rows: Sequence[CallTiming], _peaks: Mapping[str, float]) -> bytes:
    """Draw µs a call: a panel for a type and direction, at each length a bar for each layout and mode."""
    kinds = list(dict.fromkeys(kind_of(row) for row in rows))
    with figure() as (canvas, png):
        for axes, _, panel_rows in _panels(canvas, rows, "tokens of the longest text", "µs"):
            lengths = sorted({row["length"] for row in panel_rows})
            for number, kind in enumerate(kinds):
                bars = [row for row in panel_rows if kind_of(row) == kind]
                shift = BAR * (number - (len(kinds) - 1) / 2)
                places = [lengths.index(row["length"]) + shift for row in bars]
                axes.bar(places, [row["microseconds"] for row in bars], width=BAR, color=f"C{number}", label=kind)
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
    return png.getvalue()


PICTURES = {"kernels": draw_kernels, "blocks": draw_blocks}


def _panels(
    canvas: "Figure", rows: Sequence[CallTiming], xlabel: str, ylabel: str
) -> Iterator[tuple["Axes", str, list[CallTiming]]]:
    """Yield a panel for each type and direction, with its rows; then draw the legend."""
    dtypes, directions = (list(dict.fromkeys(row[key] for row in rows)) for key in ("dtype", "direction"))
    canvas.set_size_inches(4.2 * len(dtypes), 3 * len(directions))
    grid = canvas.subplots(len(directions), len(dtypes), squeeze=False)
    for line, direction in zip(grid, directions, strict=True):
        for axes, dtype in zip(line, dtypes, strict=True):
            axes.set_title(f"{dtype}, {direction}")
            axes.set_xlabel(xlabel, fontsize=8)
            axes.set_ylabel(ylabel, fontsize=8)
            yield axes, dtype, [row for row in rows if (row["dtype"], row["direction"]) == (dtype, direction)]
    handles, labels = grid[0][0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper right", ncols=len(labels))
