"""results.md of a bake-off, and what its terminal shows."""

from harness.reports.bakeoff import differences, tuning
from harness.reports.bakeoff.notes import notes
from harness.reports.bakeoff.objectives import learnt
from harness.reports.bakeoff.table import table
from harness.reports.report import head
from harness.reports.results import Results
from harness.reports.tables import paragraph


def text(results: Results) -> str:
    """Return the table and its notes for a terminal: plain text of at most 110 columns."""
    tuned = [tuning.table(results).plain()] if results.search else []
    paragraphs = "\n".join(map(paragraph, [*notes(results), *tuning.notes(results)]))
    return "\n\n".join(filter(None, [table(results).plain(), *tuned, paragraphs]))


def markdown(results: Results) -> str:
    """results.md: what was run, the table, its notes, what each student learnt by, the picture."""
    drawn = f"![{results.metric.word}, and {results.metric.word} against cost](results.png)"
    parts = [
        head(results, results.metric, results.pooled),
        table(results).markdown(),
        *notes(results),
        *differences.section(results),
        learnt(results),
        drawn,
    ]
    if results.search:
        parts += ["## Tuning", tuning.text(results), f"![validation against each option]({tuning.PICTURE})"]
    return "\n\n".join(parts) + "\n"
