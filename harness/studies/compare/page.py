"""What people read of a comparison: the table, its notes, what differs, the settings, and a picture."""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from apprentice.errors import BadInput
from harness.reports import html
from harness.reports.figures import Dot, lines_picture, metric_picture
from harness.reports.pages import cost_axis, costs, starred
from harness.reports.report import Facts, Part
from harness.reports.tables import NONE, Table, columns, count, paragraph, short
from harness.runs.files import write_bytes, write_json, write_text
from harness.runs.folders import run_files
from harness.studies.compare.differences import lines_of
from lit_modules.tasks import METRICS, Metric

DIFFER = {
    True: "What differs and may move results:",
    False: "What differs and moves nothing but times, and figures by rounding:",
}


def table(comparison: Facts) -> Table:
    """One line for each row, in the order of the runs."""
    rows, metric, baseline = comparison["rows"], METRICS[comparison["metric"]], comparison["baseline"]
    formats, first = "bytes" in rows[0], comparison["runs"][0]["name"]
    to = f" to {baseline}" if baseline and len(baseline) < 12 else ""
    cells: dict[str, Callable[[Facts], str]] = {
        "run/format" if formats else "run/student": lambda row: starred(row["name"], row),
        "data": lambda row: f"{row['data'].get('name')} {count(row['data'].get('train'))}",
        "seeds": lambda row: str(len(row["seeds"])),
        metric.columns[metric.name].removeprefix("test "): lambda row: metric.mean(row[metric.name]),
        f"Δ{to}, {metric.unit}": lambda row: (
            NONE if row["name"] in {baseline, f"{first}/{row.get('baseline')}"} else metric.difference(row["delta"])
        ),
    }
    more = _sizes_and_times(rows) if formats else {"parameters": lambda row: count(row["parameters"]), **costs(rows)}
    return columns(cells | more, rows, left=2)


def _sizes_and_times(rows: Sequence[Facts]) -> dict[str, Callable[[Facts], str]]:
    sizes = sorted({size for row in rows for size in row["latency_ms"]}, key=int)

    def milliseconds(size: str, row: Facts) -> str:
        return short(row["latency_ms"][size]["median"]) if size in row["latency_ms"] else NONE

    return {
        "KiB": lambda row: NONE if row["bytes"] is None else f"{row['bytes'] / 2**10:,.1f}",
        **{f"ms, batch {size}": partial(milliseconds, size) for size in sizes},
    }


def _notes(comparison: Facts) -> list[str]:
    metric, rows = _metric(comparison), comparison["rows"]
    sizes = {row["data"].get("test") for row in rows}
    where = f"on {count(*sizes)} test {metric.counted}" if len(sizes) == 1 else "on the test set"
    several = any(len(row["seeds"]) > 1 for row in rows)
    legend = f"{metric.word.capitalize()}{': mean ± standard deviation over the seeds,' * several} {where}."
    nets = any("baseline" in row for row in rows)
    if comparison["baseline"] or nets:
        to = comparison["baseline"] or f"the ce of the same net in {comparison['runs'][0]['name']}"
        legend += f" Δ: {'paired ' * several}difference to {to}"
        legend += ", with its 95 % interval." if several else "."
    return [legend, *comparison["notes"]]


def _differing(comparison: Facts) -> list[Part]:
    """Tables of what differs between the runs, under their titles; nothing for a single run."""
    parts: list[Part] = []
    for moves, title in DIFFER.items():
        found = [each for each in comparison["differences"] if each["may_move_results"] is moves]
        if found:
            head, lines = lines_of(found, [run["name"] for run in comparison["runs"]])
            parts += [title, Table(head, lines, left=len(head))]
    same = len(comparison["runs"]) > 1 and not parts
    return ["Settings are the same but for --out."] if same else parts


def text(comparison: Facts) -> str:
    """The table, its notes, what differs and the settings, for a terminal."""
    notes = "\n".join(map(paragraph, _notes(comparison)))
    differing = [paragraph(part) if isinstance(part, str) else part.plain() for part in _differing(comparison)]
    lists = ["\n".join([title, *(paragraph(line, "  ") for line in lines)]) for title, lines in _lists(comparison)]
    return "\n\n".join([table(comparison).plain(), notes, *differing, *lists])


def markdown(comparison: Facts) -> str:
    """The content of compare.md."""
    sources = "\n".join(f"- {run['name']}: `{run['folder']}`" for run in comparison["runs"])
    page = ["# Runs compared", sources, table(comparison).markdown(), *_notes(comparison)]
    page += [part if isinstance(part, str) else part.markdown() for part in _differing(comparison)]
    page += ["\n".join([f"{title}\n", *(f"- {line}" for line in lines)]) for title, lines in _lists(comparison)]
    return "\n\n".join([*page, f"![{_metric(comparison).word}](compare.png)"]) + "\n"


def _lists(comparison: Facts) -> list[tuple[str, list[str]]]:
    """Titles, and lines of what was set."""
    titles = {"settings": "Settings:", "objectives": "Objectives:"}
    found = [(titles[key], [f"{name}: {text}" for name, text in comparison[key].items()]) for key in titles]
    return [(title, lines) for title, lines in found if lines]


def picture(comparison: Facts) -> bytes:
    """A PNG: the metric of each row, and against its cost; rows of a run have one colour.

    If runs are compared against a setting: a line for each student, with the runs along the axis.
    """
    if "against" in comparison:
        return _against(comparison)
    rows, names = comparison["rows"], [run["name"] for run in comparison["runs"]]
    if "bytes" in rows[0]:
        label, places = "size, KiB", [None if row["bytes"] is None else row["bytes"] / 2**10 for row in rows]
    else:
        label, places = cost_axis(rows)
    lines = zip(rows, places, strict=True)
    metric = _metric(comparison)
    dots = [Dot(row["name"], row[metric.name], place, names.index(row["run"]), metric) for row, place in lines]
    return metric_picture(dots, label)


def _against(comparison: Facts) -> bytes:
    rows, axis, metric = comparison["rows"], comparison["against"], _metric(comparison)
    students = list(dict.fromkeys(row["student"] for row in rows))
    dots = [
        Dot(row["student"], row[metric.name], axis["values"][row["run"]], students.index(row["student"]), metric)
        for row in rows
    ]
    return lines_picture(dots, axis["setting"])


def _metric(comparison: Facts) -> Metric:
    return METRICS[comparison["metric"]]


def folder_name(runs: Sequence[str]) -> str:
    """A name for a folder about these runs, of at most 80 characters."""
    joined = "-".join(name.strip("/").replace("/", "_") for name in runs)
    return joined if len(joined) <= 80 else f"{joined[:70]}-{zlib.crc32(joined.encode()):08x}"


def check_folder(folder: Path, others: Sequence[str]) -> None:
    """Raise BadInput if a folder has one of these files, of a run or of a table of another kind."""
    if taken := [name for name in others if (folder / name).exists()]:
        raise BadInput("out", folder, f"a folder without a run or another table; this one holds {taken[0]}")


def save(comparison: Facts, out: str | Path | None = None, commands: Sequence[str] = ()) -> Path:
    """Write report.html, compare.md, .png and .json, and return their folder: `out`, or one under runs/compare/.

    `commands` made the runs and this comparison.
    """
    folder = Path(out) if out else Path("runs", "compare", folder_name([run["name"] for run in comparison["runs"]]))
    check_folder(folder, run_files(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text, png = markdown(comparison), picture(comparison)
        write_text(folder / "compare.md", text)
        write_text(folder / "report.html", html.page(text, {"compare.png": png}, html.repeated(commands)))
        write_bytes(folder / "compare.png", png)
        write_json(folder / "compare.json", comparison)
    except OSError as error:
        raise BadInput("out", folder, f"a folder that can be written ({error.strerror})") from error
    return folder
