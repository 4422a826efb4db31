"""The differences of all pairs of a bake-off's students."""

import itertools
from html import escape
from typing import NamedTuple

from harness.reports.results import Results
from harness.reports.uncertainty import CONFIDENCE, holm, p_value, paired_differences, paired_interval
from lit_modules.tasks import Metric


class Pair(NamedTuple):
    """A difference of two students, over the seeds that both finished."""

    one: str
    other: str
    difference: float
    interval: str  # the difference with its interval
    p: float | None  # Holm's, among all pairs; None where the difference was the same on each seed


def compare_pairs(results: Results) -> list[Pair]:
    """Compare all pairs of students with two common seeds or more."""
    metric = results.metric
    scores = {name: student.scores[metric.name] for name, student in results.students.items()}
    of_all = {pair: paired_differences(*(scores[name] for name in pair)) for pair in itertools.combinations(scores, 2)}
    tested = {pair: differences for pair, differences in of_all.items() if len(differences) > 1}
    corrected = holm({pair: p_value(differences) for pair, differences in tested.items()})
    intervals = {pair: paired_interval(differences) for pair, differences in tested.items()}
    return [
        Pair(*pair, interval["mean"] or 0.0, metric.difference(interval), corrected[pair])
        for pair, interval in intervals.items()
    ]


def pairs(results: Results) -> list[str]:
    """Write a table, as HTML, of how much better a row's student is than a column's; grey where it may be noise.

    None if no pair has two seeds.
    """
    metric, compared, names = results.metric, compare_pairs(results), list(results.students)
    if not compared:
        return []
    largest = max(abs(pair.difference) for pair in compared) or 1.0
    cells = {}
    for pair in compared:
        cells[pair.one, pair.other] = _cell(pair, metric, largest)
        mirrored = f"{metric.signed(-pair.difference)}, as {pair.one} to {pair.other} mirrored"
        turned = Pair(pair.other, pair.one, -pair.difference, mirrored, pair.p)
        cells[turned.one, turned.other] = _cell(turned, metric, largest)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = [
        f"<tr><th>{escape(row)}</th>{''.join(cells.get((row, column), '<td></td>') for column in names)}</tr>"
        for row in names
    ]
    return [f'<table class="pairs"><tbody><tr><th></th>{head}</tr>{"".join(rows)}</tbody></table>']


def _cell(pair: Pair, metric: Metric, largest: float) -> str:
    """Write a cell; if its difference is beyond noise with a colour, blue where the row's student is better."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    p = "none, as it was the same on each seed" if pair.p is None else f"{pair.p:.4f}"
    title = f"{pair.one} to {pair.other}\ndifference, {metric.unit}: {pair.interval}\np, Holm: {p}"
    style = ""
    if pair.p is not None and pair.p < 1 - CONFIDENCE:
        share = pair.difference / largest * (1 if metric.higher_is_better else -1)
        ink = "white" if abs(share) > 0.6 else "black"
        style = f' style="background:{to_hex(colormaps["RdBu"](0.5 + 0.5 * share))};color:{ink}"'
    return f'<td title="{escape(title)}"{style}>{metric.signed(pair.difference)}</td>'
