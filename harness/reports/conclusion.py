"""What a table's intervals support, in words, and no more than that."""

from collections.abc import Mapping, Sequence

from harness.reports.metrics import ACCURACY, Metric
from harness.reports.results import Interval, paired_interval
from harness.reports.tables import listed


def conclude(baseline: str, differences: Mapping[str, Sequence[float]], metric: Metric = ACCURACY) -> str:
    """One line that says which students differ from the baseline beyond the noise between seeds.

    Args:
        baseline: name of the student that the others are compared with.
        differences: by the other students' names, paired differences of the metric, one a seed; empty where a student
            can't be compared.
        metric: what was measured.
    """
    pairs = {name: len(values) for name, values in differences.items() if values}
    tested = {name: paired_interval(differences[name]) for name, number in pairs.items() if number > 1}
    single = [name for name in pairs if name not in tested]
    if not tested:
        claim = f"nothing here says that any student differs from {baseline} by more than noise"
        return f"One seed gives no interval: {claim}. Use --seeds 3 or more." if single else ""
    groups: dict[str, list[str]] = {"better": [], "worse": [], "level": [], "flat": []}
    for name, interval in tested.items():
        groups[_kind(interval, metric)].append(name)
    figures = {name: metric.signed(interval["mean"] or 0.0) for name, interval in tested.items()}
    said = [_beyond(word, groups[word], figures, baseline) for word in ("better", "worse") if groups[word]]
    if groups["level"]:
        said.append(f"{listed(groups['level'])} can't be told apart from {'it' if said else baseline}")
    if groups["flat"]:
        said.append(f"{listed(groups['flat'])} differed by the same on each seed, which is no measure of noise")
    if single:
        said.append(f"{listed(single)} had one seed to compare, so no interval")
    few, many = min(pairs[name] for name in tested), max(pairs[name] for name in tested)
    seeds = f"{few}" if few == many else f"{few} to {many}"
    caution = f"; it is not corrected for the {len(tested)} that were made" if len(tested) > 1 else ""
    return f"With {seeds} seeds, {'; '.join(said)}. A 95 % interval stands for its own comparison{caution}."


def _kind(interval: Interval, metric: Metric) -> str:
    low, high = interval["low"], interval["high"]
    assert low is not None
    assert high is not None
    if low == high:  # few seeds and a small test set: the same number of samples each time
        return "level" if low == 0 else "flat"
    if low <= 0 <= high:
        return "level"
    return "better" if (low > 0) == metric.higher_is_better else "worse"


def _beyond(word: str, names: list[str], figures: Mapping[str, str], baseline: str) -> str:
    told = [f"{name} ({figures[name]})" for name in names]
    return f"{listed(told)} {'is' if len(names) == 1 else 'are'} {word} than {baseline} beyond the noise between seeds"
