"""report.html of a comparison of students: one file to pass on, with all that results.json says."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from harness.reports import differences, html, mistakes, notes, pages, plots, tuning
from harness.reports.answers import Answer
from harness.reports.answers import section as answers_side_by_side
from harness.reports.html import Section
from harness.reports.measures import COST, ON_PAGE, PARAMETERS, columns_on_page
from harness.reports.results import Results
from harness.reports.tables import Table, table_of
from harness.runs.files import write_bytes, write_json, write_text

Images = Callable[[Sequence[int]], np.ndarray | None]  # of places in the test set, (k, C, H, W)


def save_results(
    folder: str | Path,
    results: Results,
    images: Images | None = None,
    commands: Sequence[str] = (),
    answers: Mapping[str, Sequence[Answer]] = MappingProxyType({}),
) -> None:
    """Write report.html, results.md, results.png and, last, results.json, which marks the run as finished.

    Of a run that was tuned also tuning.png. `images` are of the test set, `commands` those that made the run, and
    `answers` those of nets to prompts.
    """
    folder, pictures = Path(folder), {"results.png": pages.picture(results)}
    if results.search:
        pictures[tuning.PICTURE] = tuning.picture(results)
    for name, png in pictures.items():
        write_bytes(folder / name, png)
    write_text(folder / "results.md", pages.markdown(results))
    write_text(folder / "report.html", html.page(text(results), {}, sections(results, images, commands, answers)))
    write_json(folder / "results.json", results.to_json())


def text(results: Results) -> str:
    """Return the Markdown with which report.html begins: the answer, then what it rests on.

    What results.md has besides comes in `sections`; for its picture stand the plots.
    """
    parts = [
        pages.title(results),
        pages.lead_paragraph(results),
        pages.table(results, scores_first=True).markdown(),
        *notes.notes(results, concluded=False),
    ]
    return "\n\n".join(parts)


def sections(
    results: Results,
    images: Images | None = None,
    commands: Sequence[str] = (),
    answers: Mapping[str, Sequence[Answer]] = MappingProxyType({}),
) -> list[Section]:
    """Return the parts of report.html below those of results.md; those for which results have nothing are left out."""
    metric, described = results.metric, [pages.dots(results, cost) for cost in (COST, PARAMETERS)]
    _, students, teacher = described[0]
    against = [
        plot for label, dots, last in described for plot in plots.against(label, [*dots, *([last] if last else [])])
    ]
    validation = f"validation {metric.title.removeprefix('test ')}"
    lines = [
        *plots.curves(results, f"val/{metric.score}", validation, metric.scale),
        *plots.curves(results, "train/loss", "training loss"),
    ]
    plotted = [
        Section("Differences", "\n\n".join([_DIFFERENCES, *differences.section(results)]), plots.differences(results)),
        Section("Intervals", _INTERVALS, plots.intervals(students, teacher, metric)),
        Section("All pairs", _PAIRS, plots.pairs(results)),
        Section("Curves", "Means over seeds. A click on a name hides its line.", lines),
        Section("Accuracy against cost and size", "", against),
    ]
    search = [tuning.picture(results)] if results.search else []
    written = [
        Section("Tuning", pages.tuned(results), (), search),
        Section("Fidelity and calibration", _beside_accuracy(results)),
        *answers_side_by_side(results, answers),
        Section("Confusion", _frequent(results), (), mistakes.matrices(results)),
        _most_confused(results, images),
        Section(
            "What was run",
            f"{pages.listing(results, metric, results.pooled)}\n\n{pages.learnt(results)}",
        ),
        *html.repeat_section(commands),
    ]
    return [section for section in plotted if section.plots] + [part for part in written if part.text or part.pictures]


_INTERVALS = "Each student's seeds, mean and 95 % interval over seeds."
_DIFFERENCES = "Each student's paired difference with its intervals over seeds: thick alone, thin corrected."
_PAIRS = (
    "The mean difference of a row's student to a column's, over their common seeds. Coloured where it is beyond the "
    "noise between seeds, corrected for all of these pairs (Holm); a difference that was the same on each seed says "
    "nothing about noise, and has no colour."
)


def _beside_accuracy(results: Results) -> str:
    """Return whether nets follow their teacher, and whether their confidence is right."""
    metric = results.metric
    nets = {name: (net, net.with_means()) for name, net in results.nets.items()}
    nets = {name: pair for name, pair in nets.items() if any(pair[1][f.key] is not None for f in ON_PAGE)}
    if not nets:
        return ""
    scores = [metric.mean(net.scores[metric.name]) for net, _ in nets.values()]
    figures = columns_on_page([values for _, values in nets.values()])
    columns = [("net", list(nets)), (metric.title, scores), *figures]
    if metric.counted != "samples":
        explained = (
            "Agreement: tokens of the test that count of which a student finds the teacher's token the likeliest, too. "
            "KL: mean divergence of its distributions of such a token from the teacher's. Means over seeds."
        )
    else:
        explained = (
            "Agreement: test samples of which a student predicts the teacher's class. KL: mean divergence of its "
            "predictions from the teacher's. ECE: expected calibration error, the mean distance of confidence and "
            "accuracy in 15 bins of confidence. Means over seeds."
        )
    return f"{explained}\n\n{table_of(columns).markdown()}"


def _frequent(results: Results) -> str:
    names = mistakes.class_names(results)
    rows = [[names[truth], names[taken], f"{100 * share:.1f}"] for truth, taken, share in mistakes.frequent(results)]
    columns = ["class", "taken for", "of the class's samples, % (mean of all students)"]
    return Table(columns, rows, left=2).markdown() if rows else ""


def _most_confused(results: Results, images: Images | None) -> Section:
    worst, names, places = mistakes.most_confused(results), mistakes.class_names(results), mistakes.places(results)
    rows = [[str(places[row]), names[truth], names[taken], f"{100 * share:.0f}"] for row, truth, taken, share in worst]
    pixels = images([int(places[row]) for row, *_ in worst]) if images and worst else None
    pictures = [] if pixels is None else [mistakes.picture(pixels, mistakes.titles(results))]
    columns = ["place in the test set", "class", "taken for", "nets that were wrong, %"]
    text = "" if not worst else Table(columns, rows).markdown() if pixels is None else _CAPTION
    return Section("The most confused test samples", text, (), pictures)


_CAPTION = "Above each its class, what most students and seeds that were wrong took it for, and how many were."
