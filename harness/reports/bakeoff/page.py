"""report.html of a bake-off: one file to pass on, with all that results.json says."""

from collections.abc import Iterator, Sequence

from harness.reports import html
from harness.reports.bakeoff import differences, fidelity, mistakes, notes, plots, question, tuning
from harness.reports.bakeoff.curves import curves
from harness.reports.bakeoff.mistakes import Images
from harness.reports.bakeoff.objectives import learnt
from harness.reports.bakeoff.pairs import pairs
from harness.reports.bakeoff.table import table
from harness.reports.html import Section
from harness.reports.measures import COST, PARAMETERS
from harness.reports.report import listing, title
from harness.reports.results import Results

INTERVALS = "Each student's seeds, mean and 95 % interval over seeds."
DIFFERENCES = "Each student's paired difference with its intervals over seeds: thick alone, thin corrected."
PAIRS = (
    "The mean difference of a row's student to a column's, over their common seeds. Coloured where it is beyond the "
    "noise between seeds, corrected for all of these pairs (Holm); a difference that was the same on each seed says "
    "nothing about noise, and has no colour."
)


def text(results: Results) -> str:
    """Return the Markdown with which the page begins: the answer, then what it rests on.

    What results.md has besides comes in `sections`; for its picture stand the plots.
    """
    parts = [
        title(results),
        question.lead_paragraph(results),
        table(results, scores_first=True).markdown(),
        *notes.notes(results, concluded=False),
    ]
    return "\n\n".join(parts)


def sections(
    results: Results,
    images: Images | None = None,
    commands: Sequence[str] = (),
    more: Sequence[Section] = (),
) -> list[Section]:
    """Return the parts of the page below the first table; those for which results have nothing are left out.

    `more` are those of the run's kind of data.
    """
    search = [tuning.picture(results)] if results.search else []
    written = [
        Section("Tuning", tuning.text(results), pictures=search),
        Section("Fidelity and calibration", fidelity.text(results)),
        *more,
        *mistakes.sections(results, images),
        Section("What was run", f"{listing(results, results.metric, results.pooled)}\n\n{learnt(results)}"),
        *html.repeat_section(commands),
    ]
    return [*_plot_sections(results), *(section for section in written if section.text or section.pictures)]


def _plot_sections(results: Results) -> Iterator[Section]:
    metric = results.metric
    if compared := differences.section(results):
        yield Section("Differences", "\n\n".join([DIFFERENCES, *compared]), plots.differences(results))
    if drawn := plots.intervals(results):
        yield Section("Intervals", INTERVALS, drawn)
    if drawn := pairs(results):
        yield Section("All pairs", PAIRS, drawn)
    score, title = f"val/{metric.score}", f"validation {metric.title.removeprefix('test ')}"
    if drawn := [*curves(results, score, title, metric.scale), *curves(results, "train/loss", "training loss")]:
        yield Section("Curves", "Means over seeds. A click on a name hides its line.", drawn)
    if drawn := [*plots.against(results, COST), *plots.against(results, PARAMETERS)]:
        yield Section(f"{metric.word[0].upper()}{metric.word[1:]} against cost and size", "", drawn)
