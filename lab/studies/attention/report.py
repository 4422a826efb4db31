"""The report on attention: tables, notes, every row, and pictures of kernels and of the block."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from harness.reports.figures import GREY, figure
from harness.reports.report import MIB, Part, Report, machine, percent
from harness.reports.tables import NONE, Table, columns, join_words, short
from harness.studies.study import StudyHeader
from lab.studies.attention.measure import Row

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


def report(header: StudyHeader, rows: Sequence[Row], missing: Mapping[str, str]) -> Report:
    """Build the report from results.json's content and the reasons why cases are missing."""
    noted, said, peak = notes(rows, missing), peaks(header, rows), header["peak"]["tflops_per_second"]
    of = grouped(rows, lambda row: row["part"])
    ran = grouped((row for row in rows if row["refused"] is None), lambda row: row["part"])
    make = {
        "kernels": (KERNELS, kernels),
        "blocks": (BLOCKS, blocks),
        "layers": (LAYERS, blocks),
        "tutorial": (TUTORIAL, tutorial),
    }
    found = [(note, table(of[part])) for part, (note, table) in make.items() if part in ran]
    found += [(OPERATORS.format(what=what(row)), operators(row)) for row in ran.get("profile", ())]
    draw = {"kernels": draw_kernels, "blocks": draw_blocks}
    drawn = [part for part in draw if part in ran]
    pngs = {f"{part}.png": draw[part](ran[part], peak) for part in drawn}
    text: list[Part] = [said, *(part for note, table in found for part in (table, note)), *noted]
    page: list[Part] = [said, *(part for pair in found for part in pair), *noted]
    page += [*(IMAGES[part] for part in drawn), "## All rows", every(rows)]
    return Report(machine(header), text, page, pngs)


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """The values of each key, in order."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def what(row: Row) -> str:
    """`flash`, `dense compiled`, `jagged eager`."""
    return row["name"].partition(": ")[2].partition(",")[0]


# Tables


def kernels(rows: Sequence[Row]) -> Table:
    """A line for a type, a direction and a length; a column a kernel that ran at all."""
    backends = list(dict.fromkeys(row["backend"] for row in rows if row["refused"] is None))
    header = ["type", "pass", "texts", f"µs: {backends[0]}", *backends[1:], "fastest", "TFLOP/s", "share, %"]
    body = []
    for line, mine in grouped(rows, _line).items():
        if ran := {row["backend"]: row for row in mine if row["refused"] is None}:
            best = min(ran.values(), key=lambda row: row["microseconds"])
            cells = [_microseconds(ran.get(name), name == "auto") for name in backends]
            cells += [best["kernel"], short(best["tflops_per_second"]), percent(best["share_of_peak"])]
            body.append([*line, *cells])
    return Table(header, body, left=3)


def _line(row: Row) -> tuple[str, str, str]:
    return row["dtype"], "+ backward" if row["backward"] else "forward", f"{row['batch']} x {row['length']}"


def _microseconds(row: Row | None, with_kernel: bool = False) -> str:
    if row is None or row["refused"] is not None:
        return NONE
    return f"{short(row['microseconds'])}{' ' + row['kernel'] if with_kernel else ''}"


def blocks(rows: Sequence[Row]) -> Table:
    """A line for a type, a direction and a length; a column for dense and jagged or a layer, eager and compiled."""
    kinds = list(dict.fromkeys(what(row) for row in rows))
    body = []
    for line, mine in grouped(rows, _line).items():
        found = {what(row): row for row in mine}
        body.append([*line, *(_microseconds(found.get(kind), with_kernel=True) for kind in kinds)])
    return Table(["type", "pass", "texts", f"µs: {kinds[0]}", *kinds[1:]], body, left=3)


def tutorial(rows: Sequence[Row]) -> Table:
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


REACHED: dict[str, Callable[[Row], str]] = {
    "TFLOP/s": lambda row: short(row.get("tflops_per_second")),
    "share, %": lambda row: percent(row["share_of_peak"]),
    "peak, MiB": lambda row: NONE if (peak := row.get("peak_bytes")) is None else short(peak / MIB),
}


def operators(row: Row) -> Table:
    """The heaviest operators of a profiled row."""
    cells = {
        "operator": lambda each: each["operator"],
        "µs": lambda each: short(each["microseconds"]),
        "times": lambda each: short(each["calls"]),
        "share, %": lambda each: f"{100 * each['share']:.1f}",
    }
    return columns(cells, row["operators"])


def every(rows: Sequence[Row]) -> Table:
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


def peaks(header: StudyHeader, rows: Iterable[Row]) -> str:
    """The peak of each type, and how it was found."""
    lines = []
    products = [row for row in rows if row["part"] == "matmul"]
    for dtype, peak in header["peak"]["tflops_per_second"].items():
        reached = {row["tflops_per_second"]: row["matrix"] for row in products if row["dtype"] == dtype}
        size = f"{reached[peak]} x {reached[peak]}"
        lines.append(f"{short(peak)} in {dtype} ({size}, the best of {len(reached)} from {short(min(reached))} on)")
    return f"Peak in TFLOP/s: {join_words(lines) or NONE}; {header['peak']['is']}."


def notes(rows: Sequence[Row], missing: Mapping[str, str]) -> list[str]:
    """How operations are counted; what torch refuses here; what was left out or failed."""
    above = [ABOVE] if any((row.get("share_of_peak") or 0) > 1 for row in rows) else []
    absent = [f"{'; '.join(names)}: {why}." for why, names in grouped(missing, missing.__getitem__).items()]
    return [COUNTED, *above, *refusals(rows), *absent]


def refusals(rows: Sequence[Row]) -> list[str]:
    """What torch refuses, a line a reason."""
    lines = []
    for reason, refused in grouped((row for row in rows if row["refused"]), lambda row: row["refused"] or "").items():
        kinds = join_words(list(dict.fromkeys(f"{row['part']}: {what(row)}" for row in refused)))
        dtypes = join_words(list(dict.fromkeys(row["dtype"] for row in refused)))
        named = f"{kinds} in {dtypes}, {len(refused)} rows" if len(refused) > 1 else refused[0]["name"]
        lines.append(f"Not run: {named}: {reason.rstrip('.')}.")
    return lines


# Pictures


def draw_kernels(rows: Sequence[Row], peaks: Mapping[str, float]) -> bytes:
    """A PNG: TFLOP/s against length, a panel a type and direction, a line a kernel; dashed the product of matrices."""
    names = list(dict.fromkeys(row["backend"] for row in rows))
    with figure() as (drawn, png):
        for axes, dtype, mine in _panels(drawn, rows, "tokens of a text", "TFLOP/s"):
            for number, name in enumerate(names):
                points = sorted((row["length"], row["tflops_per_second"]) for row in mine if row["backend"] == name)
                if points:
                    # auto lies on the line of the kernel that it takes: it is drawn wide and pale beneath
                    look: dict[str, Any] = {"linewidth": 5, "alpha": 0.3} if name == "auto" else {"linewidth": 1.2}
                    axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", markersize=3, label=name, **look)
            if dtype in peaks:
                axes.axhline(peaks[dtype], color=GREY, linestyle="--", linewidth=1, label="product of matrices")
            lengths = sorted({row["length"] for row in mine})
            axes.set_xscale("log")
            axes.set_xticks(lengths, [str(length) for length in lengths], fontsize=7)
            axes.minorticks_off()
            axes.set_ylim(0)
    return png.getvalue()


def draw_blocks(rows: Sequence[Row], _peaks: Mapping[str, float]) -> bytes:
    """A PNG: µs a call, a panel a type and direction, at each length a bar for dense and jagged, eager and compiled."""
    kinds = list(dict.fromkeys(what(row) for row in rows))
    with figure() as (drawn, png):
        for axes, _, mine in _panels(drawn, rows, "tokens of the longest text", "µs"):
            lengths = sorted({row["length"] for row in mine})
            for number, kind in enumerate(kinds):
                bars = [(lengths.index(row["length"]), row["microseconds"]) for row in mine if what(row) == kind]
                places = [place + BAR * (number - (len(kinds) - 1) / 2) for place, _ in bars]
                axes.bar(places, [time for _, time in bars], width=BAR, color=f"C{number}", label=kind)
            axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
    return png.getvalue()


def _panels(drawn: "Figure", rows: Sequence[Row], xlabel: str, ylabel: str) -> Iterator[tuple["Axes", str, list[Row]]]:
    """A panel for each type and direction, with its rows; then the legend."""
    dtypes, directions = (list(dict.fromkeys(row[key] for row in rows)) for key in ("dtype", "direction"))
    drawn.set_size_inches(4.2 * len(dtypes), 3 * len(directions))
    grid = drawn.subplots(len(directions), len(dtypes), squeeze=False)
    for line, direction in zip(grid, directions, strict=True):
        for axes, dtype in zip(line, dtypes, strict=True):
            axes.set_title(f"{dtype}, {direction}")
            axes.set_xlabel(xlabel, fontsize=8)
            axes.set_ylabel(ylabel, fontsize=8)
            yield axes, dtype, [row for row in rows if (row["dtype"], row["direction"]) == (dtype, direction)]
    handles, labels = grid[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside upper right", ncols=len(labels))
