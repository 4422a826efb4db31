"""A run's folder, row by row: what is measured is kept at once, and not measured again."""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from apprentice import cli, environment, interrupts
from apprentice.cli.faults import one_line
from apprentice.errors import BadInput
from apprentice.files import write_json
from apprentice.measuring.bench import Bench
from apprentice.measuring.report import save, text
from apprentice.measuring.rows import SINGLE, Row

FIXED = ("devices", "strategy", "accelerator")  # of the Trainer: a resumed fit may change them, figures may not mix


class Log:
    """results.json of a run that is new or goes on.

    Args:
        out: the run's folder, opened.
        command: the command line.
        config: what it said.

    Raises:
        BadInput: the run in the folder was started with other devices.
    """

    def __init__(self, out: Path, command: cli.Parser, config: Namespace) -> None:
        self.out, self.parser = out, command
        settings = command.as_dict(config)
        self.rows: dict[str, dict[str, Any]] = {}
        if config.resume and (out / "results.json").exists():
            before = json.loads((out / "results.json").read_text())
            _check_same(before["config"]["trainer"], settings["trainer"], out)
            self.rows = {row["strategy"]: row for row in before["rows"]}
        self.header = {
            "experiment": "hardware", "hardware": environment.hardware(), "versions": environment.versions(),
            "config": settings,
        }  # fmt: skip
        command.save(config, out / "config.yaml")
        write_json(out / "environment.json", environment.hardware() | environment.versions())

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
            if row.name in self.rows:
                continue
            try:
                self._add(bench.measure(row), rows)
            except Exception as error:  # whatever it is: the other strategies don't depend on it
                interrupts.stop_if_requested()
                if row.name == SINGLE:
                    raise
                failed[row.name] = _said(error, self.parser)
                sys.stderr.write(f"{row.name} failed: {failed[row.name]}\n")
        missing = {**skipped, **{name: f"failed: {line}" for name, line in failed.items()}}
        results = self._write(rows)
        save(self.out, results, missing)
        print(f"{text(results, missing)}\n\n{self.out}/results.md, .png, .json")
        if failed:
            raise SystemExit(1)

    def _add(self, facts: dict[str, Any], rows: Sequence[Row]) -> None:
        self.rows[facts["strategy"]] = facts
        facts["speedup"] = facts["images_per_second"] / self.rows[SINGLE]["images_per_second"]
        self._write(rows)
        print(f"{facts['strategy']:16} {facts['images_per_second']:10,.0f} images/s", flush=True)

    def _write(self, rows: Sequence[Row]) -> dict[str, Any]:
        results = {**self.header, "rows": [self.rows[row.name] for row in rows if row.name in self.rows]}
        write_json(self.out / "results.json", results)
        return results


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    for key in FIXED:
        if before[key] != now[key]:
            shown = {each: _name(value[key]) for each, value in (("before", before), ("now", now))}
            expected = f"{shown['before']}, as the rows in {out} were measured; leave it out, or take another --out"
            raise BadInput(f"trainer.{key}", shown["now"], expected)


def _name(value: Any) -> Any:
    return value["class_path"] if isinstance(value, dict) else value


def _said(error: Exception, parser: cli.Parser) -> str:
    """An error in one line."""
    line = one_line(error, parser)
    if line is not None:
        line = line.partition("; --out FOLDER")[0]  # there is no checkpoint to go on from
    else:
        last = [text for text in str(error).splitlines() if text.strip()] or [""]
        line = last[-1] if "rror: " in last[-1] else f"{type(error).__name__}: {last[-1]}"
    return " ".join(line.split())
