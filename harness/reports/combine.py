"""Combines the records of each seed into the results of a comparison."""

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from harness.reports.measures import FIGURES, figures_of
from harness.reports.results import (
    SAMPLED,
    Packed,
    Results,
    Scores,
    StudentResults,
    TeacherResults,
    averaged_key,
    differences_to,
)
from harness.reports.uncertainty import corrected_intervals, paired_interval
from harness.runs.records import FitRecord, Header, NetRecord
from lit_modules.tasks import ACCURACY, Metric


def combine(
    header: Header,
    teachers: Sequence[FitRecord],
    students: Mapping[str, Sequence[NetRecord]],
    students_fit_seconds: Sequence[float],  # for each seed, of all students together
    metric: Metric = ACCURACY,
    variants: Mapping[str, str] = MappingProxyType({}),  # the methods of students whose names begin with a net's
    taught: Mapping[str, str] = MappingProxyType({}),  # the teachers of students that have others than `teacher`
    more_teachers: Mapping[str, Sequence[FitRecord]] = MappingProxyType({}),  # by the names of their rows
) -> Results:
    """Combine the records of each seed; None stands for what can't be computed.

    Without `teachers` students learn from labels alone, and are compared with the first one. Under `zoo` the best
    student comes first. Where each seed loaded the same teacher, its figures are those of one net.

    Raises:
        ValueError: a list does not have one entry per seed.
    """
    seeds = len(header.seeds)
    rows: dict[str, Sequence[Any]] = {**({"teacher": teachers} if teachers else {}), **more_teachers, **students}
    rows["students_fit_seconds"] = students_fit_seconds
    for name, row in rows.items():
        if len(row) != seeds:
            raise ValueError(f"{name}: expected {seeds} entries, one a seed, got {len(row)}")
    named = [name for name in header.config.get("variants", ()) if name in students]
    baseline = metric.baseline if teachers else next(iter([*named, *students]))  # a net alone is no variant
    combined = {name: combine_student(records, metric) for name, records in students.items()}
    for name, student in combined.items():
        student.taught_by, student.baseline = taught.get(name), baseline
        if (variant := variants.get(name, name)) != name:
            student.variant, student.baseline = variant, name.removesuffix(variant) + baseline
    for base in dict.fromkeys(student.baseline for student in combined.values()):
        differences = differences_to(base, combined, metric)
        corrected = corrected_intervals({name: differences[name] for name in differences if name != base})
        for name, values in differences.items():
            combined[name].delta_vs_ce = paired_interval(values)
            combined[name].delta_vs_ce_corrected = corrected.get(name)
    if header.config.get("zoo"):
        combined = dict(sorted(combined.items(), key=lambda item: _rank(item[1].scores[metric.name], metric)))
    is_tested = bool(teachers) and teachers[0].nets["teacher"].figures.get(metric.name) is not None
    by_seed = "{seed}" in (header.config.get("teacher_ckpt") or "")
    others = {name: _combine_teachers(name, fits, metric, by_seed=False) for name, fits in more_teachers.items()}
    return Results(
        **vars(header), metric=metric, students=combined, students_fit_seconds=students_fit_seconds,
        teacher=_combine_teachers("teacher", teachers, metric, by_seed) if teachers else None, more_teachers=others,
        alone={} if is_tested else _sampled(next(iter(students.values()))[0]),
    )  # fmt: skip


def _combine_teachers(row: str, fits: Sequence[FitRecord], metric: Metric, by_seed: bool) -> TeacherResults:
    """Combine the teachers of a row, which if loaded are one net, unless each seed has its own file (`by_seed`)."""
    nets, loaded = [fit.nets[row] for fit in fits], all(fit.fit_seconds is None for fit in fits)
    return TeacherResults(
        **_combine(nets, metric), nets=1 if loaded and not by_seed else len(fits), max_epochs=fits[0].max_epochs,
        fit_seconds=[fit.fit_seconds for fit in fits],
        sampled=_sampled(nets[0]),
    )  # fmt: skip


def _sampled(net: NetRecord) -> dict[str, Packed]:
    """Return the values of test samples that are the same for each net."""
    return {key: net.samples[key] for key in SAMPLED if key in net.samples}


def _rank(scores: Scores, metric: Metric) -> float:
    """Return a number that is smaller for better scores, and largest for none."""
    scaled = metric.scaled(scores)
    return statistics.mean(scaled) * (-1 if metric.higher_is_better else 1) if scaled else math.inf


def combine_student(records: Sequence[NetRecord], metric: Metric) -> StudentResults:
    """Combine the records that a net has of each seed."""
    first, failed = records[0], [net.failed for net in records]
    return StudentResults(**_combine(records, metric), objective=first.objective, net=first.net, failed=failed)


def _combine(records: Sequence[NetRecord], metric: Metric) -> dict[str, Any]:
    """Combine what teachers and students have in common; a net that failed has no figure but those of its kind."""
    trained = [{} if net.failed else net.figures for net in records]
    of_seeds = [*metric.tested, *(key for key in [averaged_key(metric)] if any(key in net for net in trained))]
    of_seeds += [figure.key for figure in FIGURES if figure.per_seed and any(figure.key in net for net in trained)]
    figures = {
        figure.key: figure.combine_known(
            [net.figures.get(figure.key) for net in records if figure.of_net or not net.failed]
        )
        for figure in figures_of(key for net in records for key in net.figures)
        if not figure.per_seed and (not figure.optional or any(figure.key in net.figures for net in records))
    }
    keys = dict.fromkeys(key for net in records for key in net.samples if key not in SAMPLED)
    samples = {key: [None if net.failed else net.samples.get(key) for net in records] for key in keys}
    ended = [None if net.failed else net.trained_epochs for net in records]
    best = [None if net.failed else net.best_epoch for net in records]
    return {
        "figures": figures, "scores": {key: [net.get(key) for net in trained] for key in of_seeds}, "samples": samples,
        "trained_epochs": ended, "epochs": [net.epochs for net in records],
        "best_epochs": best if any(epoch is not None for epoch in best) else [],
    }  # fmt: skip
