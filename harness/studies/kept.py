"""results.json of a run that measures row by row: what is there is kept, and not measured again."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from harness import config as cli
from harness.config.messages import one_line
from harness.runs import environment, session, signals
from harness.runs.files import write_json

FIXED = ("devices", "strategy", "accelerator")  # of the Trainer: a resumed fit may change them, figures may not mix
MACHINE = ("cpu", "cores", "gpus")


class ResumableResults:
    """The rows of a run that is new or goes on.

    Attributes:
        rows: by name.
        failed: by name of a row that failed, why, in one line.

    Args:
        experiment: its name.
        key: of a row's name in a row.
        out: the run's folder, opened.
        command: the command line.
        config: what it said.
        how: with what else of the machine its rows are measured, as `threads`.

    Raises:
        BadInput: the run in the folder was started with other devices, or on another machine.
    """

    def __init__(
        self, experiment: str, key: str, out: Path, command: cli.Parser, config: Namespace, **how: int | str
    ) -> None:
        self.out, self.parser = out, command
        settings = command.as_dict(config)
        self.rows: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.header = {
            "experiment": experiment, "hardware": environment.hardware() | how, "versions": environment.versions(),
            "config": settings,
        }  # fmt: skip
        if config.resume and (out / "results.json").exists():
            before = json.loads((out / "results.json").read_text())
            if "trainer" in settings:
                _check_same(before["config"]["trainer"], settings["trainer"], out)
            _check_machine(_machine(before, how), _machine(self.header, how), out)
            self.rows = {row[key]: row for row in before["rows"]}
        session.describe(out, command, config)

    def write(self, names: Iterable[str]) -> dict[str, Any]:
        """Write the rows that are there, in this order; the content of results.json."""
        results = {**self.header, "rows": [self.rows[name] for name in names if name in self.rows]}
        write_json(self.out / "results.json", results)
        return results

    def measure(self, names: Iterable[str], add: Callable[[str], None], needed: str) -> None:
        """Measure the rows that are missing; one that fails costs no other.

        Args:
            names: of the rows, in order.
            add: measures the row of a name and puts it among the rows.
            needed: name of the row that others are compared with.

        Raises:
            Exception: what ended the row that is needed.
            Interrupted: the user asked to stop.
        """
        for name in names:
            if name in self.rows or name in self.failed:
                continue
            try:
                add(name)
            except Exception as error:  # whatever it is: the other rows don't depend on it
                if name == needed:
                    signals.stop_if_requested()
                    raise
                self.fail(error, name)

    def fail(self, error: Exception, name: str, *more: str) -> None:
        """Tell that a row failed, or several for one reason, and why.

        Raises:
            Interrupted: the user asked to stop, which may be why.
        """
        signals.stop_if_requested()
        said = self._said(error)
        self.failed |= dict.fromkeys([name, *more], said)
        others = f" and {len(more)} more" if more else ""
        sys.stderr.write(f"{name}{others} failed: {said}\n")

    def missing(self, skipped: Mapping[str, str]) -> dict[str, str]:
        """Names of rows that are not there, and why: those that were skipped, and those that failed."""
        return {**skipped, **{name: f"failed: {line}" for name, line in self.failed.items()}}

    def _said(self, error: Exception) -> str:
        """An error in one line."""
        line = one_line(error, self.parser)
        if line is not None:
            line = line.partition("; --out FOLDER")[0]  # there is no checkpoint to go on from
        else:
            last = [text for text in str(error).splitlines() if text.strip()] or [""]
            line = last[-1] if "rror: " in last[-1] else f"{type(error).__name__}: {last[-1]}"
        return " ".join(line.split())


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    for key in FIXED:
        if before[key] != now[key]:
            shown = {each: _name(value[key]) for each, value in (("before", before), ("now", now))}
            expected = f"{shown['before']}, as the rows in {out} were measured; leave it out, or take another --out"
            raise BadInput(f"trainer.{key}", shown["now"], expected)


def _machine(header: Mapping[str, Any], how: Iterable[str]) -> dict[str, Any]:
    """What figures depend on that no flag says."""
    machine = {name: header["hardware"].get(name) for name in (*MACHINE, *how)}
    return {**machine, "torch": header["versions"]["torch"]}


def _check_machine(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    if differ := [f"{name} {before[name]}, not {now[name]}" for name in before if before[name] != now[name]]:
        expected = f"the machine on which the rows in {out} were measured: {'; '.join(differ)}; or take another --out"
        raise BadInput("resume", "true", expected)


def _name(value: Any) -> Any:
    return value["class_path"] if isinstance(value, dict) else value
