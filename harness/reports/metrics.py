"""What results can be measured by, and the sentence that intervals over seeds support."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from harness.reports.tables import join_words
from harness.reports.uncertainty import (
    CONFIDENCE,
    Interval,
    detectable,
    holm,
    lead_by_chance,
    p_value,
    paired_interval,
    seeds_for,
    true_spread,
)
from lit_modules.tasks import ACCURACY, Metric


def paired_differences(values: Sequence[float | None], baseline: Sequence[float | None]) -> list[float]:
    """`values - baseline` for each seed in which both finished."""
    return [v - b for v, b in zip(values, baseline, strict=True) if v is not None and b is not None]


def conclude(baseline: str, differences: Mapping[str, Sequence[float]], metric: Metric = ACCURACY) -> str:
    """Say in one line which students differ from the baseline by more than the noise between seeds.

    `differences` are paired, by the other students' names, one per seed; empty where a student can't be compared.
    """
    pairs = {name: len(values) for name, values in differences.items() if values}
    tested = {name: paired_interval(differences[name]) for name, number in pairs.items() if number > 1}
    single = [name for name in pairs if name not in tested]
    if not tested:
        claim = f"nothing here says that any other row differs from {baseline} by more than noise"
        return f"One seed gives no interval: {claim}. Use --seeds 3 or more." if single else ""
    claims = _claims(baseline, tested, holm({name: p_value(differences[name]) for name in tested}), metric)
    if single:
        claims.append(f"{join_words(single)} had one seed to compare, so no interval")
    few, many = min(pairs[name] for name in tested), max(pairs[name] for name in tested)
    seeds = f"{few}" if few == many else f"{few} to {many}"
    together = f" Corrected for {len(tested)} comparisons (Holm); the intervals are not." if len(tested) > 1 else ""
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
    sentence = f" {alone}{seeds} seeds show a difference of about {seen} {metric.unit} in 4 of 5 cases ({low} to {high}"
    third = f"; a third of it takes {needed} seeds" if needed else ""
    return f"{sentence}, as they tell the noise no better){third}."


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


def _claims(
    baseline: str, tested: Mapping[str, Interval], p_values: Mapping[str, float | None], metric: Metric
) -> list[str]:
    groups: dict[str, list[str]] = {"better": [], "worse": [], "level": [], "flat": []}
    for name, interval in tested.items():
        groups[_kind(interval, p_values[name], metric)].append(name)
    claims = []
    for word in ("better", "worse"):
        if names := groups[word]:
            students = join_words([f"{name} ({metric.signed(tested[name]['mean'] or 0.0)})" for name in names])
            verb = "is" if len(names) == 1 else "are"
            claims.append(f"{students} {verb} {word} than {baseline} beyond the noise between seeds")
    if groups["level"]:
        claims.append(f"{join_words(groups['level'])} can't be told apart from {'it' if claims else baseline}")
    if groups["flat"]:
        claims.append(f"{join_words(groups['flat'])} differed by the same on each seed, which is no measure of noise")
    return claims


def _kind(interval: Interval, p: float | None, metric: Metric) -> str:
    mean = interval["mean"] or 0.0
    if p is None:  # few seeds and a small test set: the same number of samples each time
        return "flat" if mean else "level"
    if p >= 1 - CONFIDENCE:
        return "level"
    return "better" if (mean > 0) == metric.higher_is_better else "worse"
