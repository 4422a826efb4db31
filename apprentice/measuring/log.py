"""A run of the comparison of strategies: the rows that are missing are measured, and all are told."""

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apprentice import cli, interrupts
from apprentice.measuring.bench import Bench
from apprentice.measuring.kept import Kept
from apprentice.measuring.report import save, text
from apprentice.measuring.rows import SINGLE, Row


class Log:
    """A run that is new or goes on.

    Args:
        out: the run's folder, opened.
        command: the command line.
        config: what it said.

    Raises:
        BadInput: the run in the folder was started with other devices.
    """

    def __init__(self, out: Path, command: cli.Parser, config: Namespace) -> None:
        self.kept = Kept("hardware", "strategy", out, command, config)

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
        failed = {}
        for row in rows:
            if row.name in self.kept.rows:
                continue
            try:
                self._add(bench.measure(row), rows)
            except Exception as error:  # whatever it is: the other strategies don't depend on it
                interrupts.stop_if_requested()
                if row.name == SINGLE:
                    raise
                failed[row.name] = self.kept.said(error)
                sys.stderr.write(f"{row.name} failed: {failed[row.name]}\n")
        missing = {**skipped, **{name: f"failed: {line}" for name, line in failed.items()}}
        results, out = self.kept.write(row.name for row in rows), self.kept.out
        save(out, results, missing)
        print(f"{text(results, missing)}\n\n{out}/results.md, .png, .json")
        if failed:
            raise SystemExit(1)

    def _add(self, facts: dict[str, Any], rows: Sequence[Row]) -> None:
        self.kept.rows[facts["strategy"]] = facts
        facts["speedup"] = facts["images_per_second"] / self.kept.rows[SINGLE]["images_per_second"]
        self.kept.write(row.name for row in rows)
        print(f"{facts['strategy']:16} {facts['images_per_second']:10,.0f} images/s", flush=True)
