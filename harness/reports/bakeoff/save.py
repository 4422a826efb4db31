"""The files that a bake-off leaves for people."""

from collections.abc import Sequence
from pathlib import Path

from harness.reports import html
from harness.reports.bakeoff import page, plots, texts, tuning
from harness.reports.bakeoff.mistakes import Images
from harness.reports.html import Section
from harness.reports.results import Results
from harness.runs.files import write_bytes, write_json, write_text


def save_results(
    folder: str | Path,
    results: Results,
    images: Images | None = None,
    commands: Sequence[str] = (),
    more: Sequence[Section] = (),
) -> None:
    """Write report.html, results.md, results.png and, last, results.json, which marks the run as finished.

    Of a run that was tuned also tuning.png. `images` are of the test set, `commands` those that made the run, and
    `more` the sections of its kind of data.
    """
    folder, pictures = Path(folder), {"results.png": plots.picture(results)}
    if results.search:
        pictures[tuning.PICTURE] = tuning.picture(results)
    for name, png in pictures.items():
        write_bytes(folder / name, png)
    write_text(folder / "results.md", texts.markdown(results))
    sections = page.sections(results, images, commands, more)
    write_text(folder / "report.html", html.page(page.text(results), {}, sections))
    write_json(folder / "results.json", results.to_json())
