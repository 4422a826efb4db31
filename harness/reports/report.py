"""What people read of a study: text for the terminal, results.md, pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.reports import html
from harness.reports.settings import settings
from harness.reports.tables import NONE, Table, count, paragraph, words
from harness.runs.files import write_bytes, write_text
from harness.runs.records import Header
from lit_modules.tasks import Metric

MIB = 2**20


class Code(NamedTuple):
    """Lines to paste, in a language that the fence names."""

    text: str
    language: str = ""

    def plain(self) -> str:
        return self.text

    def markdown(self) -> str:
        return f"```{self.language}\n{self.text}\n```"


Part = Table | Code | str


class Report(NamedTuple):
    """What a study has to say."""

    header: Mapping[str, str]  # what was measured on what, as the page begins
    text: Sequence[Part]  # for the terminal; strings are paragraphs
    page: Sequence[Part]  # for results.md, below the header
    figures: Mapping[str, bytes]  # PNGs by file name

    def plain(self) -> str:
        return "\n\n".join(paragraph(part) if isinstance(part, str) else part.plain() for part in self.text)

    def markdown(self, title: str) -> str:
        """Return the content of results.md."""
        header = "\n".join(f"- {name}: {value}" for name, value in self.header.items())
        parts = [part if isinstance(part, str) else part.markdown() for part in self.page]
        return "\n\n".join([f"# {title}", header, *parts]) + "\n"

    def save(self, folder: Path, title: str, commands: Sequence[str] = ()) -> None:
        """Write report.html, with the commands that made the run, results.md and the pictures."""
        text = self.markdown(title)
        write_text(folder / "results.md", text)
        write_text(folder / "report.html", html.page(text, self.figures, html.repeat_section(commands)))
        for name, png in self.figures.items():
            write_bytes(folder / name, png)


def percent(share: float | None) -> str:
    """Return a share as a whole number of hundredths."""
    return NONE if share is None else f"{100 * share:.0f}"


def machine(results: Mapping[str, Any]) -> dict[str, str]:
    """Return lines of a page's header: the machine, the versions, the commits of the code that ran, in their order."""
    lines = {name: words(results[name.lower()]) for name in ("Hardware", "Versions")}
    commits = [commit or "unknown" for commit in results.get("commits", ())]
    return lines | ({"Commit": ", then ".join(commits)} if commits else {})


def head(run: Header, metric: Metric, pooled: Sequence[str] = ()) -> str:
    """Write the head of results.md: what was run, on what."""
    return f"{title(run)}\n\n{listing(run, metric, pooled)}"


def title(run: Header) -> str:
    """Write the heading of a page."""
    return f"# {run.experiment} on {run.data['name']}"


def listing(run: Header, metric: Metric, pooled: Sequence[str] = ()) -> str:
    """List the data, the seeds, the settings and the machine of a run."""
    data = run.data
    sizes = [f"{count(data[part])} {part}" for part in ("train", "validation", "test") if data.get(part) is not None]
    lines = {
        "Data": f"{data['name']}: {', '.join(sizes)} {metric.counted}",
        "Seeds": ", ".join(map(str, run.seeds)),
        "Pooled from": ", ".join(pooled),
        "Settings": "; ".join(settings(run.config, run.free)),
        **machine(vars(run)),
    }
    return "\n".join(f"- {name}: {value}" for name, value in lines.items() if value)
