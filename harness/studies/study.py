"""The skeleton of every study: measures missing cases, keeps their rows in results.json, writes the report."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from apprentice.errors import BadInput
from harness import config as cli
from harness.config.messages import one_line
from harness.reports.report import Facts, Report
from harness.runs import environment, session, signals
from harness.runs.files import write_json

FIXED = ("devices", "strategy", "accelerator")  # of the Trainer: a resumed fit may change them, figures may not mix
MACHINE = ("cpu", "cores", "gpus")


class ResumableResults:
    """results.json of a new or resumed run.

    Args:
        experiment: its name.
        key: of a row's name in a row.
        out: the run's folder, opened.
        command: the command line.
        config: its parsed values.
        how: what else figures depend on, such as `threads`.

    Raises:
        BadInput: the run in the folder was started with other devices, or on another machine.
    """

    def __init__(
        self, experiment: str, key: str, out: Path, command: cli.Parser, config: Namespace, **how: int | str
    ) -> None:
        self.out, self.parser = out, command
        settings = command.as_dict(config)
        self.rows: dict[str, Facts] = {}  # by name
        self.failed: dict[str, str] = {}  # one-line reasons by name
        self.header: Facts = {
            "experiment": experiment, "hardware": environment.hardware() | how, "versions": environment.versions(),
            "config": settings,
        }  # fmt: skip
        if config.resume and (out / "results.json").exists():
            before = json.loads((out / "results.json").read_text())
            if "trainer" in settings:
                _check_trainer(before["config"]["trainer"], settings["trainer"], out)
            _check_machine(_machine(before, how), _machine(self.header, how), out)
            self.rows = {row[key]: row for row in before["rows"]}
        session.describe(out, command, config)

    def write(self, order: Iterable[str]) -> Facts:
        """Write results.json, rows in this order and then any others; returns its content."""
        names = dict.fromkeys([*order, *self.rows])
        results = {**self.header, "rows": [self.rows[name] for name in names if name in self.rows]}
        write_json(self.out / "results.json", results)
        return results

    def fail(self, error: Exception, name: str, *more: str) -> None:
        """Record and print that a case failed, or several for one reason."""
        signals.stop_if_requested()  # which may be the cause
        reason = self._reason(error)
        self.failed |= dict.fromkeys([name, *more], reason)
        others = f" and {len(more)} more" if more else ""
        sys.stderr.write(f"{name}{others} failed: {reason}\n")

    def missing(self, skipped: Mapping[str, str]) -> dict[str, str]:
        """Reasons, by name, why cases are not in the table: skipped ones, then failed ones."""
        return {**skipped, **{name: f"failed: {line}" for name, line in self.failed.items()}}

    def _reason(self, error: Exception) -> str:
        line = one_line(error, self.parser)
        if line is not None:
            line = line.partition("; --out FOLDER")[0]  # there is no checkpoint to go on from
        else:
            last = [text for text in str(error).splitlines() if text.strip()] or [""]
            line = last[-1] if "rror: " in last[-1] else f"{type(error).__name__}: {last[-1]}"
        return " ".join(line.split())


class Study:
    """The base of all studies, which define their cases, their lines and their report."""

    needed: ClassVar[str] = ""  # name of the case that all others are compared with: if it fails, the run ends
    files: ClassVar[str] = "results.md, .png, .json"  # what the last line of the output names

    def __init__(self, results: ResumableResults) -> None:
        self.results, self.rows, self.out = results, results.rows, results.out

    def line(self, row: Facts) -> str:
        """The line that is printed once a row is measured."""
        raise NotImplementedError

    def write(self, order: Iterable[str]) -> Facts:
        """Write results.json; returns its content."""
        return self.results.write(order)

    def has(self, name: str) -> bool:
        """Whether a case is measured, or has failed."""
        return name in self.rows or name in self.results.failed

    def keep(self, name: str, row: Facts, order: Iterable[str]) -> None:
        """Add a row, write it and print its line."""
        self.rows[name] = row
        self.write(order)
        print(self.line(row), flush=True)

    def measure(self, cases: Mapping[str, Callable[[], Facts | None]]) -> None:
        """Measure the missing cases in order; one that fails costs no other, one that gives None is left out."""
        for name, measured in cases.items():
            if self.has(name):
                continue
            try:
                if (row := measured()) is not None:
                    self.keep(name, row, cases)
            except Exception as error:  # whatever it is: the other cases don't depend on it
                if name == self.needed:
                    signals.stop_if_requested()
                    raise
                self.results.fail(error, name)

    def finish(self, report: Report, failed: bool = False) -> None:
        """Save the report and print it; exit with 1 if a case or the study `failed`."""
        report.save(self.out, self.results.header["experiment"])
        print(f"{report.plain()}\n\n{self.out}/{self.files}")
        if self.results.failed or failed:
            raise SystemExit(1)


def _check_trainer(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    for key in FIXED:
        if before[key] != now[key]:
            old, new = (value["class_path"] if isinstance(value, dict) else value for value in (before[key], now[key]))
            expected = f"{old}, as the rows in {out} were measured; leave it out, or take another --out"
            raise BadInput(f"trainer.{key}", new, expected)


def _machine(header: Facts, how: Iterable[str]) -> Facts:
    """What figures depend on beside the flags."""
    return {name: header["hardware"].get(name) for name in (*MACHINE, *how)} | {"torch": header["versions"]["torch"]}


def _check_machine(before: Facts, now: Facts, out: Path) -> None:
    if differ := [f"{name} {before[name]}, not {now[name]}" for name in before if before[name] != now[name]]:
        expected = f"the machine on which the rows in {out} were measured: {'; '.join(differ)}; or take another --out"
        raise BadInput("resume", "true", expected)
