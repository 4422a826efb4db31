"""Writes the table of docs/performance.md from the files that benchmarks have written with --out.

python benchmarks/page.py FILE ...    # rows of a benchmark that has no file stay as they are
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import ROOT
from harness.reports.tables import Table

PAGE = ROOT / "docs" / "performance.md"
COLUMNS = ["benchmark", "compared", "ours", "rival", "ratio", "target", "date"]
BEGIN, END = "<!-- table -->\n", "\n<!-- end -->"


def update_table(page: str, results: Sequence[dict]) -> str:
    """Replace the rows of the results' benchmarks in a page; return the page."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in old.splitlines()[2:]]
    measured = {result["benchmark"] for result in results}
    rows = [line for line in cells if line[0] not in measured]
    rows += [[result["benchmark"], *row, result["date"]] for result in results for row in result["rows"]]
    rows.sort(key=lambda line: line[0])
    return before + BEGIN + Table(COLUMNS, rows, left=2).markdown() + END + after


def main(argv: Sequence[str] | None = None) -> None:
    files = [Path(name) for name in (sys.argv[1:] if argv is None else argv)]
    results = [json.loads(file.read_text()) for file in files]
    results = [result for result in results if {"rows", "benchmark", "date"} <= result.keys()]
    PAGE.write_text(update_table(PAGE.read_text(), results))


if __name__ == "__main__":
    main()
