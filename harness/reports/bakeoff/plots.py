"""Charts of a bake-off's nets: results.png, and the same as SVGs, one by one, for report.html."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.reports import charts
from harness.reports.bakeoff.differences import baseline_differences
from harness.reports.charts import Dot
from harness.reports.measures import Figure, axis, cost_of
from harness.reports.results import NetResults, Results, name_baseline
from harness.reports.svg import HALF, HEIGHT, WIDE, svg
from harness.reports.uncertainty import Interval

ROW, MARGIN = 26, 70  # pixels of height: of a net, and of the axis


@dataclass(frozen=True)
class NetDots:
    """What is drawn of nets against a cost."""

    axis: str  # the label of the cost's axis
    students: Sequence[Dot]
    teacher: Dot | None

    @property
    def teacher_mean(self) -> float | None:
        return self.teacher.mean if self.teacher and self.teacher.scores else None


def net_dots(results: Results, cost: Figure | None = None) -> NetDots:
    """Describe what is drawn of nets against a cost, by default the one by which they are compared."""
    metric, students = results.metric, results.students
    nets: dict[str, NetResults] = {**students, **({"teacher": results.teacher} if results.teacher else {})}
    chosen = cost_of([student.figures for student in students.values()]) if cost is None else cost
    label, places = axis(chosen, [net.figures for net in nets.values()])
    groups = {name: group for group, name in enumerate(students)}
    dots = {
        name: Dot(name, net.scores[metric.name], place, groups.get(name), metric)
        for (name, net), place in zip(nets.items(), places, strict=True)
    }
    return NetDots(label, [dots[name] for name in students], dots.get("teacher"))


def picture(results: Results) -> bytes:
    """results.png: the metric with its intervals, the differences with theirs, and the metric against the cost."""
    dots = net_dots(results)
    return charts.metric_picture(dots.students, dots.axis, dots.teacher_mean, *_collect_intervals(results))


def intervals(results: Results) -> list[str]:
    """Draw each student's seeds, mean and interval, and the teacher's mean; nothing if all failed."""
    dots = net_dots(results)
    finished = [dot for dot in dots.students if dot.scores]
    if not finished:
        return []
    draw = charts.draw_values
    return [svg(WIDE, _height(finished), lambda figure: draw(figure.subplots(), finished, dots.teacher_mean))]


def differences(results: Results) -> list[str]:
    """Draw each student's difference to its baseline, with its interval alone and, thin, corrected; nothing of none."""
    compared, to = _collect_intervals(results)
    dots = [dot for dot in net_dots(results).students if dot.name in compared]
    if not dots:
        return []
    draw = charts.draw_differences
    return [svg(WIDE, _height(dots), lambda figure: draw(figure.subplots(), dots, compared, to))]


def against(results: Results, cost: Figure) -> list[str]:
    """Draw the mean of the metric against a cost, for the nets of which both are known; nothing without any."""
    drawn = net_dots(results, cost)
    dots = [dot for dot in (*drawn.students, drawn.teacher) if dot and dot.scores and dot.cost]
    if not dots:
        return []
    draw = charts.draw_against_cost
    return [svg(HALF, HEIGHT, lambda figure: draw(figure.subplots(), dots, results.metric, drawn.axis))]


def _height(dots: Sequence[Dot]) -> int:
    return MARGIN + ROW * len(dots)


def _collect_intervals(results: Results) -> tuple[dict[str, tuple[Interval, Interval]], str]:
    """Return the differences that have an interval over seeds, alone and corrected, and a label of their axis."""
    known = [row for row in baseline_differences(results) if row.single["low"] is not None]
    of_net = " of the same net" * (len({student.baseline for student in results.students.values()}) > 1)
    to = f"Δ to {name_baseline(results)}{of_net}, {results.metric.unit}"
    return {row.name: (row.single, row.corrected or row.single) for row in known}, to
