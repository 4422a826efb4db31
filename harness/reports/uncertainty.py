"""Intervals of differences over seeds and test samples, several comparisons at once, and the sentence they support.

Values without any spread say nothing about noise, so they have neither an interval nor a p: with few seeds and a small
test set, two nets that differ by chance often differ by the same number of samples on each seed.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from scipy.special import chdtri, nctdtrinc, ndtr, stdtr, stdtrit

Interval = dict[str, float | None]
K = TypeVar("K", bound=Hashable)
CONFIDENCE = 0.95
POWER = 0.8
MOST_SEEDS = 10_000


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

    What is told apart is wrong of any comparison in 5 % of runs at most. As simultaneous intervals they cover less than
    95 % where some differences are told apart: 0.93 of 4,000 simulated runs of six students with a baseline in common,
    of which three differ by far, with 3, 5 and 10 seeds alike. Bonferroni's would cover 95 % and contradict the claims.
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


def holm(p_values: Mapping[K, float | None]) -> dict[K, float | None]:
    """Adjust p values so that all comparisons together err as often as one would (Holm 1979).

    A comparison without a p counts among all, and stays without.
    """
    adjusted: dict[K, float | None] = dict.fromkeys(p_values)
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
