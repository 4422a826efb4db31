"""The content of compare.json: a row for each run's student, compared with the first run's `ce` where that is fair.

A student of several nets is compared with the first run's `ce` of the net of that name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.reports.conclusions import conclude
from harness.reports.endings import ended_early, failures
from harness.reports.results import Scores, StudentResults
from harness.reports.uncertainty import Interval, corrected_intervals, paired_differences, paired_interval
from harness.studies.compare.differences import Difference, differences, objectives_of, settings_of
from harness.studies.compare.fairness import other_settings, why_not_comparable
from harness.studies.compare.runs import FinishedRun
from lit_modules.tasks import Metric

CONFOUNDED = "What differs between them may come from these: no verdict."


@dataclass(frozen=True)
class ComparedNet:
    """A run's student or language model, as `entry`: a row of the table."""

    name: str  # in the table
    run: str  # the name of its run
    student: str  # its name in the run
    data: Mapping[str, Any]  # the name of the run's data set and its sizes
    seeds: Sequence[int]  # of the run
    scores: Scores  # one a seed; None where it failed
    entry: StudentResults  # what the run says of it
    differences: Sequence[float]  # to the first run's baseline, over the seeds in common, in the order there

    corrected: Interval | None = None  # that of `delta`, corrected for all comparisons that the notes judge (Holm)

    @property
    def delta(self) -> Interval:
        return paired_interval(self.differences)

    def to_json(self, metric: Metric) -> dict[str, Any]:
        entry = self.entry
        return {
            "name": self.name, "run": self.run, "student": self.student, "data": self.data, "seeds": self.seeds,
            metric.name: self.scores, **({"objective": entry.objective} if entry.objective else {}), **entry.figures,
            **({"baseline": entry.baseline} if entry.variant else {}),
            "failed": [failure and asdict(failure) for failure in entry.failed], "differences": self.differences,
            "delta": self.delta, "delta_corrected": self.corrected,
        }  # fmt: skip


@dataclass(frozen=True)
class ComparedRun:
    """A run in a comparison; `other_settings` are, by flag, its value and the first run's."""

    name: str
    folder: str
    other_settings: Mapping[str, tuple[Any, Any]]


@dataclass(frozen=True)
class Comparison:
    """Finished runs side by side."""

    metric: Metric  # what the runs are measured by
    runs: Sequence[ComparedRun]  # in their order
    baseline: str | None  # the row that others are compared with, if there is one
    rows: Sequence[ComparedNet]  # in the order of the runs
    notes: Sequence[str]  # sentences below the table
    settings: Mapping[str, str]  # of all runs and of single ones, in words
    objectives: Mapping[str, str]  # what students learnt by, in words
    differences: Sequence[Difference]  # between the runs

    def to_json(self) -> dict[str, Any]:
        return {
            "experiment": "compare", "metric": self.metric.name, "runs": [vars(run) for run in self.runs],
            "baseline": self.baseline, "rows": [row.to_json(self.metric) for row in self.rows], "notes": self.notes,
            "settings": self.settings, "objectives": self.objectives,
            "differences": [vars(difference) for difference in self.differences],
        }  # fmt: skip


def compare(runs: Sequence[FinishedRun]) -> Comparison:
    """Compare runs; one with other settings than the first's has intervals but no verdict."""
    first, metric, baseline = runs[0], runs[0].metric, runs[0].baseline
    usual = first.experiment.baseline
    baselines = {  # of each row the student of the first run that it is compared with
        run.name: {name: entry.baseline if entry.variant else usual for name, entry in run.entries.items()}
        for run in runs
    }
    names = [name for name in dict.fromkeys(baselines[first.name].values()) if name in first.entries]
    bases = {name: _by_seed(first, name) for name in names}
    other = {run.name: other_settings(run, first) for run in runs}
    rows: list[ComparedNet] = []
    notes: list[str] = []
    if not bases:
        notes.append(f"{first.name}, the first run, has no student called {usual}: no differences are given.")
    confounded: dict[str, list[str]] = {}  # runs by the sentence on their settings
    for run in runs:
        reason = why_not_comparable(first, run) if bases else ""
        if reason:
            notes.append(f"{run.name} is not compared with {baseline or first.name}: {reason}.")
        if flags := ", ".join(other[run.name]):
            sentence = f"and {first.name} differ in settings: {flags}.{'' if reason else f' {CONFOUNDED}'}"
            confounded.setdefault(sentence, []).append(run.name)
        rows += [_row(run, name, {} if reason else bases.get(to, {})) for name, to in baselines[run.name].items()]
        notes += [f"{run.name}: {line}" for line in ended_early(run.results)]
        notes += failures(run.seeds, {f"{run.name}/{name}": entry.failed for name, entry in run.entries.items()})
    notes += [f"{', '.join(names)} {sentence}" for sentence, names in confounded.items()]
    if bases and any(set(run.seeds) != set(first.seeds) for run in runs):
        notes.append("Differences are paired over the seeds that a run has in common with the first.")
    for name in bases:
        to = f"{first.name}/{name}"
        same = [row for row in rows if baselines[row.run][row.student] == name and not other[row.run]]
        judged = {row.name: row.differences for row in same if row.name != to}
        notes.append(conclude(to, judged, metric, "compare.json"))
        corrected = corrected_intervals(judged)
        rows = [replace(row, corrected=corrected.get(row.name, row.corrected)) for row in rows]
    return Comparison(
        metric=metric,
        runs=[ComparedRun(run.name, str(run.folder), other[run.name]) for run in runs],
        baseline=baseline,
        rows=rows,
        notes=[note for note in notes if note],
        settings=settings_of(runs),
        objectives=objectives_of(runs),
        differences=differences(runs),
    )


def _by_seed(run: FinishedRun, name: str) -> dict[int, float | None]:
    """Return a row's score with each seed."""
    return dict(zip(run.seeds, run.entries[name].scores[run.metric.name], strict=True))


def _row(run: FinishedRun, name: str, base: Mapping[int, float | None]) -> ComparedNet:
    """Return a run's row; its differences are to the scores `base`, by seed."""
    scores = _by_seed(run, name)
    common = [seed for seed in base if seed in scores]
    differences = paired_differences([scores[seed] for seed in common], [base[seed] for seed in common])
    named = (f"{run.name}/{name}", run.name, name, run.results.data, run.seeds)
    return ComparedNet(*named, list(scores.values()), run.entries[name], differences)
