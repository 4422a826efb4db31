"""Intervals of differences over seeds and test samples, several comparisons at once, and the sentence they support.

Values without any spread say nothing about noise, so they have neither an interval nor a p: with few seeds and a small
test set, two nets that differ by chance often differ by the same number of samples on each seed.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.special import chdtri, nctdtrinc, ndtr, stdtr, stdtrit

from harness.reports.tables import join_words
from lit_modules.tasks import ACCURACY, Metric

Interval = dict[str, float | None]
CONFIDENCE = 0.95
POWER = 0.8
MOST_SEEDS = 10_000
MOST_LISTED = 6  # intervals in a sentence


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Compute the mean and its interval by Student's t; bounds are None without a spread, all for no values."""
    if len({*values}) < 2:
        return {"mean": values[0] if values else None, "low": None, "high": None}
    mean = statistics.mean(values)
    half = _quantile(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def paired_interval(differences: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Compute `t_interval` of paired differences, one per seed."""
    # Float subtraction gives 0.9 - 0.8 and 0.5 - 0.4 a spread of 1e-16, and so an interval that excludes zero.
    return t_interval([round(difference, 12) for difference in differences], confidence)


def corrected_intervals(differences: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """Compute the intervals of paired differences that exclude zero just where `holm` finds a difference.

    Each has the confidence at which Holm's procedure has tested it: with m comparisons 1 - 0.05 / m for the smallest p,
    1 - 0.05 / (m - 1) for the next one, and so on up to the first that is not told apart, whose confidence all others
    have. Comparisons of fewer than two seeds have no interval, and do not count.
    """
    p_values = {name: p_value(values) for name, values in differences.items() if len(values) > 1}
    left, confidences = len(p_values), dict.fromkeys(differences, CONFIDENCE)
    for name, p in sorted(p_values.items(), key=lambda item: 1.0 if item[1] is None else item[1]):
        confidences[name] = 1 - (1 - CONFIDENCE) / left
        if p is not None and p < (1 - CONFIDENCE) / left:
            left -= 1
    return {name: paired_interval(values, confidences[name]) for name, values in differences.items()}


def crossed_interval(differences: np.ndarray) -> Interval:
    """Compute mean and 95 % interval over seeds and test samples together, of differences (seeds, samples).

    It stands for other seeds and another test set of this size. Two-way random effects: with the mean squares A between
    seeds, B between samples and E of the rest, the mean's variance is (A + B - E) / (seeds samples). Its parts A and
    max(B - E, 0) each get the quantile of their own degrees of freedom (Graybill and Wang, "Confidence intervals on
    nonnegative linear combinations of variances", 1980), which covers 95 % where Satterthwaite's one number of degrees
    of freedom covers 92 % with 3 seeds. It is never narrower than the interval over seeds alone.

    Bounds are None for fewer than 2 seeds or 2 samples, and where all differences are the same.
    """
    seeds, samples = differences.shape
    mean = float(differences.mean())
    if seeds < 2 or samples < 2 or differences.min() == differences.max():
        return {"mean": mean, "low": None, "high": None}
    of_seed, of_sample = differences.mean(1, keepdims=True), differences.mean(0, keepdims=True)
    rest = differences - of_seed - of_sample + mean
    between_seeds = samples * float(of_seed.var(ddof=1))
    between_samples = seeds * float(of_sample.var(ddof=1))
    within = float((rest**2).sum()) / ((seeds - 1) * (samples - 1))
    parts = {seeds - 1: between_seeds, samples - 1: max(between_samples - within, 0.0)}
    half = math.sqrt(sum(_quantile(freedom) ** 2 * part for freedom, part in parts.items()) / (seeds * samples))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def p_value(differences: Sequence[float]) -> float | None:
    """Compute the two-sided p of Student's t for paired differences, of two seeds or more; None if all are the same."""
    rounded = [round(difference, 12) for difference in differences]
    mean, spread = statistics.mean(rounded), statistics.stdev(rounded)
    if not spread:
        return None
    return 2 * float(stdtr(len(rounded) - 1, -abs(mean) / spread * math.sqrt(len(rounded))))


def holm(p_values: Mapping[str, float | None]) -> dict[str, float | None]:
    """Adjust p values so that all comparisons together err as often as one would (Holm 1979).

    A comparison without a p counts among all, and stays without.
    """
    adjusted: dict[str, float | None] = dict.fromkeys(p_values)
    worst, tested = 0.0, {name: p for name, p in p_values.items() if p is not None}
    for done, (name, p) in enumerate(sorted(tested.items(), key=lambda item: item[1])):
        worst = adjusted[name] = max(worst, min(1.0, (len(p_values) - done) * p))
    return adjusted


def detectable(spread: float, seeds: int) -> float:
    """Return the difference that so many seeds show in 80 % of cases, where single differences have this deviation."""
    freedom = seeds - 1
    return float(nctdtrinc(freedom, 1 - POWER, _quantile(freedom))) * spread / math.sqrt(seeds)


def true_spread(spread: float, seeds: int) -> tuple[float, float, float]:
    """Estimate the deviation behind one that so many seeds showed, with the bounds of its 95 % interval.

    The estimate is as often too large as too small; the deviation that was seen is mostly too small.
    """
    shares = 0.5, (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2
    middle, low, high = (spread * math.sqrt((seeds - 1) / float(chdtri(seeds - 1, share))) for share in shares)
    return middle, low, high


def expected_maximum(count: int) -> float:
    """Return the mean of the largest of so many values that are drawn from a standard normal distribution."""
    x = np.linspace(0.0, 10.0, 10_001)
    return float(np.trapezoid(1 - ndtr(x) ** count - ndtr(-x) ** count, x))


def lead_by_chance(values: np.ndarray) -> float:
    """Return how far the best of these rows (rows, seeds) would lie above their mean if only noise told them apart.

    The noise is what is left of the values without the means of rows and of seeds: what all rows of a seed share moves
    no row past another. Needs two rows and two seeds.
    """
    rows, seeds = values.shape
    rest = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    noise = math.sqrt(float((rest**2).sum()) / ((rows - 1) * (seeds - 1)))
    return expected_maximum(rows) * noise / math.sqrt(seeds)


def seeds_for(spread: float, difference: float) -> int | None:
    """Return the fewest seeds that show a difference in 80 % of cases; None for more than 10,000."""
    if detectable(spread, MOST_SEEDS) > difference:
        return None
    return 2 + bisect_left(range(2, MOST_SEEDS), -difference, key=lambda seeds: -detectable(spread, seeds))


def _quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    return float(stdtrit(freedom, (1 + confidence) / 2))


def paired_differences(values: Sequence[float | None], baseline: Sequence[float | None]) -> list[float]:
    """`values - baseline` for each seed in which both finished."""
    return [v - b for v, b in zip(values, baseline, strict=True) if v is not None and b is not None]


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
        return f"One seed gives no interval: {claim}. Use --seeds 3 or more." if single else ""
    corrected = corrected_intervals({name: differences[name] for name in tested})
    claims = _claims(baseline, tested, corrected, metric)
    if single:
        claims.append(f"{join_words(single)} had one seed to compare, so no interval")
    few, many = min(pairs[name] for name in tested), max(pairs[name] for name in tested)
    seeds = f"{few}" if few == many else f"{few} to {many}"
    together = _corrected(corrected, metric, file) if len(tested) > 1 else ""
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


def _corrected(intervals: Mapping[str, Interval], metric: Metric, file: str) -> str:
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
