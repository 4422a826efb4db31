"""What the tests of the studies share: a run that they look at, and what all studies do alike."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.commands import left_by_overwriting, refused_elsewhere, results
from tests.launching import until
from tests.processes import Run

KEYS = {"format", "experiment", "hardware", "versions", "commits", "config", "free", "rows"}
FILES = ("config.yaml", "environment.json", "report.html", "results.md")


def rows(out: Path) -> dict[str, Any]:
    return {row.get("name") or row["strategy"]: row for row in results(out)["rows"]}


def exit_code(script: ModuleType, *flags: str) -> Any:
    with pytest.raises(SystemExit) as stop:
        script.main([*flags])
    return stop.value.code


class StudyTests:
    """Tests of any study; a module that inherits them has a fixture `run`."""

    script: ModuleType  # of experiments
    bench: type  # which measures
    keys: frozenset[str] = frozenset()  # more keys of results.json
    pictures: tuple[str, ...] = ("results.png",)
    elsewhere: tuple[dict[str, Any], ...]  # changes to the machine
    other: tuple[str, str, str]  # a flag that the run can't go on with, its value, and what is expected

    def test_a_run_leaves_what_the_issue_names(self, run: Path, tmp_path: Path) -> None:
        found, name = results(run), self.script.__name__.rpartition(".")[2]
        assert found.keys() == KEYS | self.keys
        assert found["experiment"] == name
        for file in (*FILES, *self.pictures):
            assert (run / file).stat().st_size > 0
        assert f"{name}.py " in (run / "report.html").read_text().partition("The command that repeats it")[2]
        assert not left_by_overwriting(run, tmp_path)

    def test_a_run_that_was_measured_elsewhere_does_not_go_on(
        self, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for number, changes in enumerate(self.elsewhere):
            refused_elsewhere(self.script.main, run, changes, tmp_path / str(number), capsys)

    def test_what_is_measured_is_not_measured_again(
        self, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before, (flag, value, expected) = results(run)["rows"], self.other
        monkeypatch.setattr(self.bench, "measure", None)
        self.script.main(["--out", str(run), "--resume", "true"])
        assert results(run)["rows"] == before
        file = (run / "results.json").read_bytes()
        refusals = {("--resume", "true", flag, value): f"{flag} {value}: expected {expected}"}
        for flags, said in (refusals | {(): "--resume true, --overwrite true"}).items():
            assert exit_code(self.script, "--out", str(run), *flags) == 2
            assert said in capsys.readouterr().err
        assert (run / "results.json").read_bytes() == file


def ends_by_a_signal(
    main: Callable[[list[str]], None], flags: list[str], tmp_path: Path, kept: set[str], prints: str = ""
) -> None:
    """A signal ends a run, which keeps its rows; it is sent once these are there, and the run has printed something."""
    out = tmp_path / "run"
    run = Run(main, [*flags, "--out", str(out)], log=tmp_path / "log")
    until(lambda: (out / "results.json").exists() and rows(out).keys() == kept and prints in run.output, run)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT, run.output
    assert "--resume true" in run.output
    assert rows(out).keys() == kept
