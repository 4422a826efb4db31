"""A run of the comparison of strategies: the rows that are missing are measured, and all are told."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.studies.hardware.bench import Bench
from harness.studies.hardware.report import save, text
from harness.studies.hardware.rows import SINGLE, Row
from harness.studies.kept import ResumableResults


class Log:
    """A run that is new or goes on.

    Args:
        kept: what there is of it, by `strategy`.
    """

    def __init__(self, kept: ResumableResults) -> None:
        self.kept = kept

    def run(self, bench: Bench, rows: Sequence[Row], skipped: Mapping[str, str]) -> None:
        """Measure the rows that are missing, print and save the table.

        Args:
            bench: measures.
            rows: in the order of the table, one process first.
            skipped: strategies that can't be measured here, and why.

        Raises:
            SystemExit: a row failed; the others are there.
            Exception: what ended the fit on one process: nothing can be compared then.
        """
        by_name = {row.name: row for row in rows}
        self.kept.measure(by_name, lambda name: self._add(bench.measure(by_name[name]), by_name), SINGLE)
        results, out, missing = self.kept.write(by_name), self.kept.out, self.kept.missing(skipped)
        save(out, results, missing)
        print(f"{text(results, missing)}\n\n{out}/results.md, .png, .json")
        if self.kept.failed:
            raise SystemExit(1)

    def _add(self, facts: dict[str, Any], names: Iterable[str]) -> None:
        self.kept.rows[facts["strategy"]] = facts
        facts["speedup"] = facts["images_per_second"] / self.kept.rows[SINGLE]["images_per_second"]
        self.kept.write(names)
        print(f"{facts['strategy']:16} {facts['images_per_second']:10,.0f} images/s", flush=True)
