"""What the rows of a comparison were made with, and in what their runs differ."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.cli.resuming import CALL, rules_of
from harness.reports.bakeoff.objectives import objectives
from harness.reports.settings import OF_TABLE, settings, write_value
from harness.reports.tables import NONE, join_words
from harness.runs.options import RunOptions
from harness.studies.compare.fairness import changed_nets, idle_settings, known_by_content, same
from harness.studies.compare.runs import FinishedRun

FEW = 3  # runs that have a column each
MACHINE = ("cpu", "cores", "gpus", "threads")
# Settings of one call, and what rows, lists and headings say.
LEFT_OUT = {"seeds", *OF_TABLE, *(option for option, rule in rules_of(RunOptions).items() if rule is CALL)}


@dataclass(frozen=True)
class Difference:
    """A setting, or a fact of a run, that differs: its text in each run."""

    setting: str
    may_move_results: bool  # what does not may move times, and figures by rounding
    values: Mapping[str, str]


def settings_of(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """Return all settings: those of all runs, then by their names those of single runs."""
    # Options 0 and 0.0 are equal: a resumed run has read its settings, a new one has a class's defaults.
    lines_by_run = {
        run.name: {re.sub(r"\.0(?=[,)\]])", "", line): line for line in settings(run.config, run.results.free)}
        for run in runs
    }
    shared = set[str].intersection(*(set(lines) for lines in lines_by_run.values()))
    single = {name: [line for key, line in lines.items() if key not in shared] for name, lines in lines_by_run.items()}
    common = [line for key, line in lines_by_run[runs[0].name].items() if key in shared]
    settings_by_run = {"all runs": common, **single} if len(runs) > 1 else {runs[0].name: common}
    return {name: "; ".join(lines) for name, lines in settings_by_run.items() if lines}


def objectives_of(runs: Sequence[FinishedRun]) -> dict[str, str]:
    """Return what students learnt by, by their names; by those of rows where it differs between the runs."""
    learnt_by_run = {run.name: objectives(run.results) for run in runs}
    objectives_by_row: dict[str, str] = {}
    for student in dict.fromkeys(student for learnt in learnt_by_run.values() for student in learnt):
        texts = {f"{run}/{student}": learnt[student] for run, learnt in learnt_by_run.items() if student in learnt}
        groups = list(_by_value(texts))
        objectives_by_row |= {student if len(groups) == 1 else join_words(rows): text for text, rows in groups}
    return objectives_by_row


def differences(runs: Sequence[FinishedRun]) -> list[Difference]:
    """List what differs between runs; a student's options are compared between the runs that have it.

    Where a class differs, its options are in its text.
    """
    first, *others = runs
    idle, by_setting = idle_settings(runs), dict[str, Difference]()
    idle |= set.intersection(*(known_by_content(first, run) for run in others)) if others else set()
    for flag in dict.fromkeys(flag for run in runs for flag in run.settings if flag not in LEFT_OUT):
        sharing = [run for run in runs if _has_student(run, flag)]
        if not all(same(flag, run.settings.get(flag), sharing[0].settings.get(flag)) for run in sharing):
            name = _outer(flag, sharing, by_setting)
            values = {run.name: set_to(run.setting(name)) for run in sharing}
            by_setting.setdefault(name, Difference(name, not sharing[0].is_free(name) and name not in idle, values))
    for name, moves, values in _facts(runs):
        if len(set(values.values())) > 1:
            by_setting[name] = Difference(name, moves, values)
    return list(by_setting.values())


def _has_student(run: FinishedRun, flag: str) -> bool:
    """Return False for an option of a student that the run has not trained."""
    group, _, rest = flag.partition(".")
    trained = {entry.variant or name for name, entry in run.entries.items()}
    return group != "variants" or rest.partition(".")[0] in trained


def _outer(flag: str, runs: Iterable[FinishedRun], settings: Iterable[str]) -> str:
    """Return the setting to name for a flag: the class that differs around it, or the group that a run lacks."""
    group = flag.partition(".")[0]
    if any(run.config.get(group) is None for run in runs):
        return group
    return next((name for name in settings if flag.startswith(f"{name}.")), flag)


def _facts(runs: Sequence[FinishedRun]) -> Iterator[tuple[str, bool, dict[str, str]]]:
    """Yield what else a figure may depend on: sizes of the data, seeds, commits, versions; then the machine."""
    counted = runs[0].metric.counted
    for part in ("train", "validation", "test"):
        yield f"{part} {counted}", True, {run.name: set_to(run.results.data.get(part)) for run in runs}
    yield "seeds", True, {run.name: ", ".join(map(str, run.seeds)) for run in runs}
    yield "commit", True, {run.name: _commits(run) for run in runs}
    versions = {run.name: run.results.versions for run in runs}
    for name in dict.fromkeys(name for of_run in versions.values() for name in of_run):
        yield name, True, {run: set_to(of_run.get(name)) for run, of_run in versions.items()}
    for run in runs[1:]:
        for net, change in changed_nets(runs[0], run).items():
            if change:
                texts = {runs[0].name: set_to(change.before), run.name: set_to(change.now)}
                yield f"{net}: {change.what}", True, texts
    for name in MACHINE:
        yield name, False, {run.name: set_to(run.results.hardware.get(name)) for run in runs}


def _commits(run: FinishedRun) -> str:
    commits = [commit or "unknown" for commit in run.results.commits]
    return ", then ".join(re.sub(r"^(\w{12})\w+", r"\1", commit) for commit in commits) or NONE


def set_to(value: Any) -> str:
    """Return what a setting is set to, in words."""
    return NONE if value is None or value == [] else write_value(value)


def _by_value(texts: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each text with the names that have it."""
    for text in dict.fromkeys(texts.values()):
        yield text, [name for name, other in texts.items() if other == text]


def lines_of(differing: Sequence[Difference], runs: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return header and lines of a table of differences: a column for each of few runs, else a line for each value."""
    if len(runs) <= FEW:
        lines = [[one.setting, *(one.values.get(run, NONE) for run in runs)] for one in differing]
        return ["setting", *runs], lines
    return ["setting", "value", "runs"], [line for difference in differing for line in _by_run(difference)]


def _by_run(difference: Difference) -> list[list[str]]:
    groups = list(_by_value(difference.values))
    most = max((names for _, names in groups), key=len)
    lines = [[text, "the others" if names is most and len(most) > FEW else join_words(names)] for text, names in groups]
    return [["" if i else difference.setting, *line] for i, line in enumerate(lines)]
