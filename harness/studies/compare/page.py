"""What people read of a comparison: the table, its notes, what differs, the settings, and a picture."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from apprentice.errors import BadInput
from harness.reports import html
from harness.reports.charts import Dot, metric_picture
from harness.reports.endings import star_failed
from harness.reports.measures import axis, columns_on_page, cost_of, in_table
from harness.reports.report import Part
from harness.reports.tables import NONE, Table, count, paragraph, table_of
from harness.runs.files import write_bytes, write_json, write_text
from harness.runs.folders import run_files
from harness.studies.compare.comparison import Comparison
from harness.studies.compare.differences import lines_of

FILES = ("compare.json", "compare.md", "compare.png", "report.html")  # of a table; the first says that it is one
DIFFER = {
    True: "What differs and may move results:",
    False: "What differs and moves nothing but times, and figures by rounding:",
}


def table(comparison: Comparison, scores_first: bool = False) -> Table:
    """Return one line for each row, in the order of the runs; see `harness.reports.bakeoff.table.table`."""
    rows, metric, baseline = comparison.rows, comparison.metric, comparison.baseline
    first, to = comparison.runs[0].name, f" to {baseline}" if baseline and len(baseline) < 12 else ""
    bases = {baseline, *(f"{first}/{row.entry.baseline}" for row in rows if row.entry.variant)}
    differences = [NONE if row.name in bases else metric.difference(row.delta) for row in rows]
    figures = [row.entry.with_means() for row in rows]
    names = ("run/student", [star_failed(row.name, row.entry.failed) for row in rows])
    of = [
        ("data", [f"{row.data.get('name')} {count(row.data.get('train'))}" for row in rows]),
        ("seeds", [str(len(row.seeds)) for row in rows]),
    ]
    scores = [
        (metric.columns[metric.name].removeprefix("test "), [metric.mean(row.scores) for row in rows]),
        *columns_on_page(figures, metric.beside),
        (f"Δ{to}, {metric.unit}", differences),
    ]
    costs = [figure.column(figures) for figure in in_table(figures)]
    if scores_first:
        return table_of([names, *scores, *of, *costs])
    return table_of([names, *of, *scores, *costs], left=2)


def _notes(comparison: Comparison) -> list[str]:
    metric, rows = comparison.metric, comparison.rows
    sizes = {row.data.get("test") for row in rows}
    where = f"on {count(*sizes)} test {metric.counted}" if len(sizes) == 1 else "on the test set"
    several = any(len(row.seeds) > 1 for row in rows)
    legend = f"{metric.word.capitalize()}{': mean ± standard deviation over the seeds,' * several} {where}."
    nets = any(row.entry.variant for row in rows)
    if comparison.baseline or nets:
        to = comparison.baseline or f"the ce of the same net in {comparison.runs[0].name}"
        legend += f" Δ: {'paired ' * several}difference to {to}"
        legend += ", with its 95 % interval." if several else "."
    return [legend, *comparison.notes]


def _list_differing(comparison: Comparison) -> list[Part]:
    """Return tables of what differs between the runs, under their titles; nothing for a single run."""
    parts: list[Part] = []
    for moves, title in DIFFER.items():
        differing = [difference for difference in comparison.differences if difference.may_move_results is moves]
        if differing:
            head, lines = lines_of(differing, [run.name for run in comparison.runs])
            parts += [title, Table(head, lines, left=len(head))]
    same = len(comparison.runs) > 1 and not parts
    return ["Settings are the same but for the folder."] if same else parts


def text(comparison: Comparison) -> str:
    """Return the table, its notes, what differs and the settings, for a terminal."""
    notes = "\n".join(map(paragraph, _notes(comparison)))
    differing = [paragraph(part) if isinstance(part, str) else part.plain() for part in _list_differing(comparison)]
    lists = ["\n".join([title, *(paragraph(line, "  ") for line in lines)]) for title, lines in _lists(comparison)]
    return "\n\n".join([table(comparison).plain(), notes, *differing, *lists])


def markdown(comparison: Comparison, scores_first: bool = False) -> str:
    """Return the content of compare.md, and with `scores_first` that of report.html."""
    sources = "\n".join(f"- {run.name}: `{run.folder}`" for run in comparison.runs)
    page = ["# Runs compared", sources, table(comparison, scores_first).markdown(), *_notes(comparison)]
    page += [part if isinstance(part, str) else part.markdown() for part in _list_differing(comparison)]
    page += ["\n".join([f"{title}\n", *(f"- {line}" for line in lines)]) for title, lines in _lists(comparison)]
    return "\n\n".join([*page, f"![{comparison.metric.word}](compare.png)"]) + "\n"


def _lists(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return titles, and lines of what was set."""
    lists = {"Settings:": comparison.settings, "Objectives:": comparison.objectives}
    return [(title, [f"{name}: {text}" for name, text in texts.items()]) for title, texts in lists.items() if texts]


def picture(comparison: Comparison) -> bytes:
    """Draw a PNG: the metric of each row, and against its cost; rows of a run have one colour."""
    rows, groups = comparison.rows, {run.name: group for group, run in enumerate(comparison.runs)}
    figures = [row.entry.with_means() for row in rows]
    label, costs = axis(cost_of(figures), figures)
    pairs = zip(rows, costs, strict=True)
    return metric_picture(
        [Dot(row.name, row.scores, cost, groups[row.run], comparison.metric) for row, cost in pairs], label
    )


@contextmanager
def table_folder(out: str | Path | None, kind: str, runs: Sequence[str], files: Sequence[str]) -> Iterator[Path]:
    """Make the folder of a table about runs, `out` or one under runs/, whose `files` replace those of an earlier one.

    The first of them says that there is an earlier one: without it, files of these names are somebody else's.

    Raises:
        BadInput: it holds a run or a table of another kind, or can't be written.
    """
    joined = "-".join(name.strip("/").replace("/", "_") for name in runs)
    name = joined if len(joined) <= 80 else f"{joined[:70]}-{zlib.crc32(joined.encode()):08x}"
    folder = Path(out) if out else Path("runs", kind, name)
    for file in ("compare.json", *run_files(folder)):
        if file not in files and (folder / file).exists():
            raise BadInput("out", folder, f"a folder without a run or another table; this one holds {file}")
    left = [file for file in files if (folder / file).exists()]
    if left and files[0] not in left:
        raise BadInput("out", folder, f"a folder without a table, or with one of its own; this one holds {left[0]}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise BadInput("out", folder, f"a folder that can be written ({error.strerror})") from error


def save(comparison: Comparison, out: str | Path | None = None, commands: Sequence[str] = ()) -> Path:
    """Write report.html, compare.md, .png and .json, and return their folder: `out`, or one under runs/compare/.

    `commands` made the runs and this comparison.
    """
    with table_folder(out, "compare", [run.name for run in comparison.runs], FILES) as folder:
        text, png = markdown(comparison, scores_first=True), picture(comparison)
        write_text(folder / "compare.md", markdown(comparison))
        write_text(folder / "report.html", html.page(text, {"compare.png": png}, html.repeat_section(commands)))
        write_bytes(folder / "compare.png", png)
        write_json(folder / "compare.json", comparison.to_json())
    return folder
