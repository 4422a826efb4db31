"""The sentences that intervals of differences support."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from harness.reports.tables import join_words
from harness.reports.uncertainty import (
    Interval,
    corrected_intervals,
    detectable,
    lead_by_chance,
    paired_interval,
    seeds_for,
    true_spread,
)
from lit_modules.tasks import ACCURACY, Metric

MOST_LISTED = 6  # intervals in a sentence


def conclude(
    baseline: str, differences: Mapping[str, Sequence[float]], metric: Metric = ACCURACY, file: str = "results.md"
) -> str:
    """Say in one line which students differ from the baseline by more than the noise between seeds.

    `differences` are paired, by the other students' names, one per seed; empty where a student can't be compared. The
    line has the corrected intervals, but of more than six it names the `file` that has them.
    """
    pairs = {name: len(values) for name, values in differences.items() if values}
    tested = {name: paired_interval(differences[name]) for name, number in pairs.items() if number > 1}
    single = [name for name in pairs if name not in tested]
    if not tested:
        claim = f"nothing here says that any other row differs from {baseline} by more than noise"
        return f"One seed gives no interval: {claim}. Use three seeds or more." if single else ""
    corrected = corrected_intervals({name: differences[name] for name in tested})
    claims = _claims(baseline, tested, corrected, metric)
    if single:
        claims.append(f"{join_words(single)} had one seed to compare, so no interval")
    few, many = min(pairs[name] for name in tested), max(pairs[name] for name in tested)
    seeds = f"{few}" if few == many else f"{few} to {many}"
    together = _describe_corrected(corrected, metric, file) if len(tested) > 1 else ""
    spreads = [statistics.stdev(differences[name]) for name, interval in tested.items() if interval["low"] is not None]
    power = _power(statistics.median(spreads), few, len(tested), metric) if spreads else ""
    return f"With {seeds} seeds, {'; '.join(claims)}.{together}{power}"


def _power(spread: float, seeds: int, comparisons: int, metric: Metric) -> str:
    """Say what difference so many seeds can show, given this deviation, and how many seeds a third of it takes.

    It is not corrected for several comparisons, of which Holm's correction depends on the others' differences. Of two
    seeds nothing is said: they leave it open over a factor of 70.
    """
    if seeds < 3:
        return ""
    differences = [metric.scale * detectable(deviation, seeds) for deviation in true_spread(spread, seeds)]
    if not round(differences[0] / 3, metric.digits):
        return ""
    seen, low, high = (f"{min(difference, metric.limits[1]):.{metric.digits}f}" for difference in differences)
    needed = seeds_for(1.0, detectable(1.0, seeds) / 3)
    alone = "In a single comparison, " if comparisons > 1 else ""
    third = f"; to detect a third of that takes {needed} seeds" if needed else ""
    said = f"{seeds} seeds detect a difference of {seen} {metric.unit} in 4 of 5 cases"
    return f" {alone}{said} ({low} to {high}, as {seeds} seeds tell the noise no better){third}."


def lead(rows: Sequence[Sequence[float | None]], metric: Metric) -> str:
    """Say for a sorted table how far the first of equal students is ahead by chance; empty where unknown."""
    whole = np.array([values for values in rows if None not in values], dtype=float)
    if whole.ndim < 2 or min(whole.shape) < 2:
        return ""
    ahead = f"{metric.scale * lead_by_chance(whole):.{metric.digits}f} {metric.unit}"
    return (
        f"Sorted by {metric.word}: were these {len(whole)} students equal, the first would be about {ahead} better "
        "than their mean by the noise between seeds alone."
    )


def _describe_corrected(intervals: Mapping[str, Interval], metric: Metric, file: str) -> str:
    """Name the corrected intervals beside those of the table; of many, the file that has them."""
    known = {name: interval for name, interval in intervals.items() if interval["low"] is not None}
    if not known:
        return ""
    listed = ", ".join(f"{name} {metric.difference(interval)}" for name, interval in known.items())
    where = listed if len(known) <= MOST_LISTED else f"in {file}"
    return f" The table's intervals are of single comparisons; corrected for all {len(intervals)} (Holm): {where}."


def _claims(
    baseline: str, single: Mapping[str, Interval], corrected: Mapping[str, Interval], metric: Metric
) -> list[str]:
    groups: dict[str, list[str]] = {"better": [], "worse": [], "level": [], "alone": [], "flat": []}
    for name, interval in single.items():
        groups[_kind(interval, corrected[name], metric)].append(name)

    def signed(names: Sequence[str]) -> str:
        return join_words([f"{name} ({metric.signed(single[name]['mean'] or 0.0)})" for name in names])

    claims = []
    for word in ("better", "worse"):
        if names := groups[word]:
            verb = "is" if len(names) == 1 else "are"
            claims.append(f"{signed(names)} {verb} {word} than {baseline} beyond the noise between seeds")
    if groups["level"]:
        claims.append(f"{join_words(groups['level'])} can't be told apart from {'it' if claims else baseline}")
    if groups["alone"]:
        verb, to = "differs" if len(groups["alone"]) == 1 else "differ", "it" if claims else baseline
        but = f"but can't be told apart from it once all {len(single)} comparisons are corrected for"
        claims.append(f"{signed(groups['alone'])} {verb} from {to} in a comparison alone, {but}")
    if groups["flat"]:
        claims.append(f"{join_words(groups['flat'])} differed by the same on each seed, which is no measure of noise")
    return claims


def _kind(single: Interval, corrected: Interval, metric: Metric) -> str:
    mean = single["mean"] or 0.0
    if single["low"] is None:  # few seeds and a small test set: the same number of samples each time
        return "flat" if mean else "level"
    if not _excludes_zero(single):
        return "level"
    if not _excludes_zero(corrected):
        return "alone"
    return "better" if (mean > 0) == metric.higher_is_better else "worse"


def _excludes_zero(interval: Interval) -> bool:
    return (interval["low"] or 0.0) > 0 or (interval["high"] or 0.0) < 0
