"""The differences of students to their baselines, with the intervals that the sentence under the table speaks of."""

from collections.abc import Iterator
from typing import NamedTuple

from harness.reports import samples
from harness.reports.results import Results
from harness.reports.tables import NONE, join_words, table_of
from harness.reports.uncertainty import Interval


class BaselineDifference(NamedTuple):
    """A student's difference to its baseline with three intervals, of which each has the same mean."""

    name: str
    single: Interval  # over seeds, of this comparison alone
    corrected: Interval | None  # over seeds, corrected for all comparisons to this baseline
    both: Interval | None  # over seeds and test samples, of this comparison alone


def baseline_differences(results: Results) -> Iterator[BaselineDifference]:
    """Yield the differences that have an interval."""
    for name, student in results.students.items():
        single = student.delta_vs_ce
        if single is None or name == student.baseline or student.baseline not in results.students:
            continue
        both = samples.difference_over_both(results, name, student.baseline)
        known = both if both is not None and both["low"] is not None else None
        if known is not None or single["low"] is not None:
            yield BaselineDifference(name, single, student.delta_vs_ce_corrected, known)


def section(results: Results) -> list[str]:
    """Write what results.md has of them: an explanation, a table, and why two intervals are the same; or nothing."""
    metric, compared = results.metric, [*baseline_differences(results)]
    if not compared:
        return []
    counted, columns = metric.drawn or metric.counted, [("variant", [row.name for row in compared])]
    explained = ["Intervals of 95 %: of each comparison alone, over seeds and on this test set, as in the table above"]
    columns.append((f"Δ alone, {metric.unit}", [metric.difference(row.single) for row in compared]))
    if any(row.corrected != row.single for row in compared):
        explained.append(
            "corrected for all comparisons to the same student (Holm), as the sentence is: it excludes 0 where a "
            "difference is told apart, which is wrong of any in at most 5 % of runs; that all of them hold their true "
            "differences together is less sure, 93 % where half of six differ"
        )
        corrected = [NONE if row.corrected is None else metric.difference(row.corrected) for row in compared]
        columns.append((f"Δ corrected, {metric.unit}", corrected))
    if any(row.both for row in compared):
        explained.append("alone, over seeds and test samples together: it holds for other test sets of this size, too")
        both = [NONE if row.both is None else metric.difference(row.both) for row in compared]
        columns.append((f"Δ alone, over seeds and test {counted}, {metric.unit}", both))
    same = [row.name for row in compared if row.both and metric.difference(row.both) == metric.difference(row.single)]
    return ["; ".join(explained) + ".", table_of(columns).markdown(), *([_why_same(same)] if same else [])]


def _why_same(names: list[str]) -> str:
    """Say why the test samples do not widen these students' intervals."""
    return (
        f"Of {join_words(names)} the interval over seeds and test samples is that over seeds alone: which samples the "
        "two nets differ in changes from seed to seed as much as chance alone would have it, so that the estimate of "
        "what other test samples add to the variance is 0, or too small for these digits."
    )
