"""The formats told: a table on the terminal, results.md, results.png."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.reports.pages import settings
from harness.reports.tables import NONE, Table, count, paragraph, short
from harness.runs.files import write_bytes, write_text
from harness.studies.deploy.picture import batch_sizes, picture
from harness.studies.hardware.report import words

Facts = dict[str, Any]
COLUMNS = (
    "Size: of the ONNX file, for bfloat16 of the weights as safetensors. Latency: median (95th percentile) of calls of "
    "each net in turn, compiled by Inductor with frozen weights. Images/s: at the largest batch. Difference: to "
    "float32, the largest of a logit on the test set."
)


def text(results: Facts, notes: Sequence[str]) -> str:
    """The table for a terminal, and beneath it what its columns are."""
    return "\n\n".join([table(results["rows"]).plain(), *map(paragraph, [COLUMNS, *notes])])


def save(folder: Path, results: Facts, notes: Sequence[str]) -> None:
    """Write results.md and results.png.

    Raises:
        OSError: the folder can't be written.
    """
    write_text(folder / "results.md", markdown(results, notes))
    if batch_sizes(results["rows"]):
        write_bytes(folder / "results.png", picture(results["rows"]))


def markdown(results: Facts, notes: Sequence[str]) -> str:
    """results.md: what was measured on what, the table, the picture."""
    facts = {name: words(results[name.lower()]) for name in ("Data", "Hardware", "Versions")}
    facts["Settings"] = "; ".join(settings(results["config"]))
    header = "\n".join(f"- {name}: {fact}" for name, fact in facts.items())
    image = "![accuracy against latency](results.png)"
    return "\n\n".join(["# quantize", header, table(results["rows"]).markdown(), COLUMNS, *notes, image]) + "\n"


def table(rows: Sequence[Facts]) -> Table:
    """One line a format."""
    sizes = batch_sizes(rows)
    header = ["format", "test accuracy, %", "correct", "size, KiB", *(f"ms, batch {size}" for size in sizes)]
    body = [
        [
            row["format"],
            f"{100 * row['test_acc']:.2f}",
            count(row["test_correct"]),
            NONE if row["bytes"] is None else f"{row['bytes'] / 2**10:,.1f}",
            *(_times(row["latency_ms"].get(size)) for size in sizes),
            short(row["images_per_second"]) if row["latency_ms"] else NONE,
            f"{row['max_logit_difference']:.2g}",
        ]
        for row in rows
    ]
    return Table([*header, "images/s", "difference"], body)


def _times(times: dict[str, float] | None) -> str:
    return f"{short(times['median'])} ({short(times['p95'])})" if times else NONE
