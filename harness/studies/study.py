"""The skeleton of every study: measures missing cases, keeps their rows in results.json, writes the report."""

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, TypedDict, TypeVar

from apprentice.errors import BadInput
from harness.cli import as_flags
from harness.cli.messages import GOES_ON, one_line
from harness.reports.report import Report
from harness.runs import environment, signals
from harness.runs.files import read_text, write_json
from harness.runs.progress import clock
from harness.runs.quiet import notice
from harness.runs.records import FORMAT, check_format, reading
from harness.runs.session import Session

FIXED = ("devices", "strategy", "accelerator")  # of the Trainer: a resumed fit may change them, figures may not mix
SLOW = 2.0  # seconds a case takes if each is announced
MACHINE = ("cpu", "cores", "gpus")


Measurement = TypeVar("Measurement", bound=Mapping[str, Any])  # an entry of results.json


class StudyHeader(TypedDict, total=False):
    """What results.json has above its rows; some keys are of one study alone."""

    format: int
    experiment: str
    data: dict[str, Any]
    fingerprint: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    config: dict[str, Any]
    free: list[str]  # names of settings that figures do not depend on
    commits: list[str | None]
    failed: dict[str, str]
    peak: dict[str, Any]


class Study(Generic[Measurement]):
    """The base of all studies, which define their cases, their lines and their report.

    Args:
        run: the session, its folder open; rows of a resumed run are kept.
        how: what figures depend on beside the flags, such as `threads`.

    Raises:
        BadInput: the run in the folder was started with other devices, or on another machine.
    """

    key: ClassVar[str] = "name"  # of a row's name in a row
    needed: ClassVar[str] = ""  # name of the case that all others are compared with: if it fails, the run ends
    files: ClassVar[str] = "report.html, results.md, .png, .json"  # what the last line of the output names

    def __init__(self, session: Session, **how: int | str) -> None:
        self.out, self.parser = session.out, session.parser
        self.rows: dict[str, Measurement] = {}  # by name
        self.failed: dict[str, str] = {}  # one-line reasons by name
        self.header: StudyHeader = {
            "format": FORMAT, "experiment": session.name,
            "hardware": environment.hardware() | how, "versions": environment.versions(),
            "config": session.parser.as_dict(session.config), "free": session.parser.free,
        }  # fmt: skip
        if session.config.resume and (self.out / "results.json").exists():
            with reading(self.out, "out"):
                before = json.loads(read_text(self.out / "results.json"))
                check_format(before, self.out)
                self._check_same(before, how)
                self.rows = {row[self.key]: row for row in before["rows"]}
        session.describe()
        self.header["commits"] = environment.commits(self.out)

    def _check_same(self, before: Mapping[str, Any], how: Iterable[str]) -> None:
        rows = f"the rows in {self.out} were measured"
        now = self.header["config"].get("trainer", {})
        for key in FIXED:
            if key in now and (was := before["config"]["trainer"][key]) != now[key]:
                old, new = (value["class_path"] if isinstance(value, dict) else value for value in (was, now[key]))
                raise BadInput(f"trainer.{key}", new, f"{old}, as {rows}; leave it out, or take another `out`")
        here, there = ({**part["hardware"], "torch": part["versions"]["torch"]} for part in (self.header, before))
        names = [name for name in (*MACHINE, *how, "torch") if there.get(name) != here.get(name)]
        if differ := [f"{name} {there.get(name)}, not {here.get(name)}" for name in names]:
            expected = f"the machine on which {rows}: {'; '.join(differ)}; or take another `out`"
            raise BadInput("resume", "true", expected)

    def line(self, row: Measurement) -> str:
        """Return the line that is printed once a row is measured."""
        raise NotImplementedError

    def write(self, order: Iterable[str]) -> list[Measurement]:
        """Write results.json, rows in this order and then any others; returns the rows."""
        names = dict.fromkeys([*order, *self.rows])
        rows = [self.rows[name] for name in names if name in self.rows]
        write_json(self.out / "results.json", {**self.header, "rows": rows})
        return rows

    def has(self, name: str) -> bool:
        """Return whether a case is measured, or has failed."""
        return name in self.rows or name in self.failed

    def keep(self, name: str, row: Measurement, order: Iterable[str]) -> None:
        """Add a row, write it and print its line."""
        self.rows[name] = row
        self.write(order)
        print(self.line(row), flush=True)

    def fail(self, error: Exception, name: str, *others: str) -> None:
        """Record and print that a case failed, or several for one reason."""
        signals.stop_if_requested()  # which may be the cause
        line = one_line(error, self.parser)
        if line is None:
            last = (str(error).strip().splitlines() or [""])[-1]
            line = last if "rror: " in last else f"{type(error).__name__}: {last}"
        line = " ".join(line.partition(f"; {GOES_ON}")[0].split())  # there is no checkpoint to go on from
        self.failed |= dict.fromkeys([name, *others], line)
        counted = f" and {len(others)} more" if others else ""
        sys.stderr.write(f"{name}{counted} failed: {line}\n")

    def missing(self, skipped: Mapping[str, str]) -> dict[str, str]:
        """Return reasons, by name, why cases are not in the table: skipped ones, then failed ones."""
        why = {name: as_flags(reason, self.parser) for name, reason in skipped.items()}
        return {**why, **{name: f"failed: {line}" for name, line in self.failed.items()}}

    def measure(self, cases: Mapping[str, Callable[[], Measurement | None]]) -> None:
        """Measure the missing cases in order; one that fails costs no other, one that gives None is left out."""
        missing = {name: measured for name, measured in cases.items() if not self.has(name)}
        start = time.monotonic()
        for done, (name, measured) in enumerate(missing.items()):
            seconds = (time.monotonic() - start) / done if done else None
            if seconds is None or seconds >= SLOW:
                left = "" if seconds is None else f", about {clock(seconds * (len(missing) - done))} left"
                notice(f"measuring {name}: {done + 1} of {len(missing)}{left}")
            try:
                if (row := measured()) is not None:
                    self.keep(name, row, cases)
            except Exception as error:  # whatever it is: the other cases don't depend on it
                if name == self.needed:
                    signals.stop_if_requested()
                    raise
                self.fail(error, name)

    def finish(self, report: Report, failed: bool = False) -> None:
        """Save the report and print it; exit with 1 if a case or the study `failed`."""
        report.save(self.out, self.header["experiment"], environment.commands(self.out))
        print(f"{report.plain()}\n\n{self.out}/{self.files}")
        if self.failed or failed:
            raise SystemExit(1)
