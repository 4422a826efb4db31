"""The table of a bake-off: a line for each teacher and each student."""

from harness.reports.endings import star_failed
from harness.reports.measures import columns_on_page, in_table
from harness.reports.results import NetResults, Results, StudentResults, TeacherResults, averaged_key, name_baseline
from harness.reports.tables import NONE, Table, table_of
from lit_modules.tasks import Metric


def table(results: Results, scores_first: bool = False) -> Table:
    """Return one line for each teacher and one for each student.

    `scores_first` puts the scores and differences beside the names, where a small screen shows them.
    """
    metric, nets, students = results.metric, results.nets, results.students
    teachers, blank = results.teachers, [NONE] * len(results.teachers)
    figures = [net.with_means() for net in nets.values()]
    differences = [_difference(name, student, metric) for name, student in students.items()]
    names = ("variant", [*teachers, *(star_failed(name, student.failed) for name, student in students.items())])
    learnt_by = [*blank, *(student.objective for student in students.values())]
    kind = [
        *([("objective", learnt_by)] if results.teacher else []),  # else all learn by the same
        *(figure.column(figures) for figure in in_table(figures) if figure.of_net),
    ]
    scores = [
        *((title, [_mean(net, key, metric) for net in nets.values()]) for key, title in metric.columns.items()),
        *columns_on_page(figures, metric.beside),
        *_averages(results),
    ]
    if results.teacher or len(students) > 1:  # else a net is alone
        scores.append((f"Δ to {name_baseline(results)}, {metric.unit}", [*blank, *differences]))
    costs = [figure.column(figures) for figure in in_table(figures) if not figure.of_net]
    if scores_first:
        return table_of([names, *scores, *kind, *costs])
    return table_of([names, *kind, *scores, *costs], left=2 if results.teacher else 1)


def _mean(net: NetResults, key: str, metric: Metric) -> str:
    """Write the mean of a score over all nets; `NONE` of a teacher that was not tested."""
    if isinstance(net, TeacherResults):
        scores = net.scores[key][: net.nets]
        return NONE if all(score is None for score in scores) else metric.mean(scores)
    return metric.mean(net.scores[key])


def _averages(results: Results) -> list[tuple[str, list[str]]]:
    """Return the column of the metric by moving averages of weights, where students have them."""
    metric, key = results.metric, averaged_key(results.metric)
    title = f"by EMA of weights, {metric.columns[metric.name].rpartition(', ')[2]}"
    cells = [metric.mean(net.scores[key]) if key in net.scores else NONE for net in results.nets.values()]
    return [(title, cells)] if any(cell != NONE for cell in cells) else []


def _difference(name: str, student: StudentResults, metric: Metric) -> str:
    if name == student.baseline or student.delta_vs_ce is None:
        return NONE
    return metric.difference(student.delta_vs_ce)
