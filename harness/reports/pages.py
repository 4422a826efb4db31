"""Pages of a comparison of students: the table on the terminal, results.md and results.png."""

from collections.abc import Iterable, Mapping, Sequence

from harness.reports import differences, tuning
from harness.reports.figures import Dot, metric_picture
from harness.reports.measures import COST, STEP, Figure, columns_on_page, in_table
from harness.reports.notes import conclusions, notes, question, star_failed
from harness.reports.report import machine
from harness.reports.results import (
    NetResults,
    Results,
    StudentResults,
    TeacherResults,
    averaged_key,
    name_baseline,
)  # fmt: skip
from harness.reports.settings import objectives, settings
from harness.reports.tables import NONE, Table, count, join_words, paragraph, table_of
from harness.runs.records import Header
from lit_modules.tasks import Metric


def text(results: Results) -> str:
    """Return the table and its notes for a terminal: plain text of at most 110 columns."""
    tuned = [tuning.table(results).plain()] if results.search else []
    paragraphs = "\n".join(map(paragraph, [*notes(results), *tuning.notes(results)]))
    return "\n\n".join(filter(None, [table(results).plain(), *tuned, paragraphs]))


def markdown(results: Results) -> str:
    """results.md: what was run, the table, its notes, what each student learnt by, the picture."""
    drawn = f"![{results.metric.word}, and {results.metric.word} against cost](results.png)"
    parts = [
        head(results, results.metric, results.pooled),
        table(results).markdown(),
        *notes(results),
        *differences.section(results),
        learnt(results),
        drawn,
        *_tuned(results),
    ]
    return "\n\n".join(parts) + "\n"


def learnt(results: Results) -> str:
    """List what each student learnt by; without teachers, what each is."""
    lines = "\n".join(f"- {name}: {objective}" for name, objective in objectives(results).items())
    return f"{'Objectives of the students' if results.teacher else 'Nets'}:\n\n{lines}"


def lead_paragraph(results: Results) -> str:
    """Say in words what the comparison asks, what its answer is, and how sure that is."""
    metric = results.metric
    scores = {name: metric.mean(net.scores[metric.name]) for name, net in results.nets.items()}
    unit = f" {metric.unit if metric.scale == 1 else '%'}"
    reached = join_words([f"{name} {score}{unit * (score != NONE)}" for name, score in scores.items()])
    answer = " ".join(conclusions(results)) or f"{reached}."
    return f"**Question.** {question(results)}\n\n**Answer, and how sure it is.** {answer}"


def _tuned(results: Results) -> list[str]:
    if results.search is None:
        return []
    return ["## Tuning", tuned(results), f"![validation against each option]({tuning.PICTURE})"]


def tuned(results: Results) -> str:
    """Write the table of a search and its notes; nothing without one."""
    if results.search is None:
        return ""
    return "\n\n".join([tuning.table(results).markdown(), *tuning.notes(results)])


def head(run: Header, metric: Metric, pooled: Sequence[str] = ()) -> str:
    """Write the head of results.md: what was run, on what."""
    return f"{title(run)}\n\n{listing(run, metric, pooled)}"


def title(run: Header) -> str:
    """Write the heading of a page."""
    return f"# {run.experiment} on {run.data['name']}"


def listing(run: Header, metric: Metric, pooled: Sequence[str] = ()) -> str:
    """List the data, the seeds, the settings and the machine of a run."""
    data = run.data
    sizes = [f"{count(data[part])} {part}" for part in ("train", "validation", "test") if data.get(part) is not None]
    lines = {
        "Data": f"{data['name']}: {', '.join(sizes)} {metric.counted}",
        "Seeds": ", ".join(map(str, run.seeds)),
        "Pooled from": ", ".join(pooled),
        "Settings": "; ".join(settings(run.config, run.free)),
        **machine(vars(run)),
    }
    return "\n".join(f"- {name}: {value}" for name, value in lines.items() if value)


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
        (f"Δ to {name_baseline(results)}, {metric.unit}", [*blank, *differences]),
    ]
    costs = [figure.column(figures) for figure in in_table(figures) if not figure.of_net]
    if scores_first:
        return table_of([names, *scores, *kind, *costs])
    return table_of([names, *kind, *scores, *costs], left=2 if results.teacher else 1)


def _mean(net: NetResults, key: str, metric: Metric) -> str:
    """Write the mean of a score over all nets."""
    return metric.mean(net.scores[key][: net.nets] if isinstance(net, TeacherResults) else net.scores[key])


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


def picture(results: Results) -> bytes:
    """results.png: the metric with its intervals, the differences with theirs, and the metric against the cost."""
    label, students, teacher = dots(results, cost_of([student.figures for student in results.students.values()]))
    rows = [row for row in differences.rows(results) if row.single["low"] is not None]
    compared = {row.name: (row.single, row.corrected or row.single) for row in rows}
    baselines = {student.baseline for student in results.students.values()}
    to = f"Δ to {baselines.pop() if len(baselines) == 1 else 'ce of the same net'}, {results.metric.unit}"
    return metric_picture(students, label, teacher.mean if teacher and teacher.scores else None, compared, to)


def dots(results: Results, cost: Figure) -> tuple[str, list[Dot], Dot | None]:
    """Describe what is drawn of nets against a cost: the label of its axis, a dot for each student, the teacher's."""
    metric = results.metric
    nets: dict[str, NetResults] = {**results.students, **({"teacher": results.teacher} if results.teacher else {})}
    label, places = axis(cost, [net.figures for net in nets.values()])
    groups = [*range(len(results.students)), None]
    rows = zip(nets.items(), places, groups, strict=False)
    described = [Dot(name, net.scores[metric.name], place, group, metric) for (name, net), place, group in rows]
    return label, described[: len(results.students)], described[-1] if results.teacher else None


Figures = Mapping[str, float | None]  # of a net, by key


def cost_of(nets: Iterable[Figures]) -> Figure:
    """Choose the cost that nets are compared by: FLOPs of training, or milliseconds a step where none has them."""
    return STEP if all(net.get(COST.key) is None for net in nets) else COST


def axis(cost: Figure, nets: Sequence[Figures]) -> tuple[str, list[float | None]]:
    """Label an axis of a cost, and return the nets' values in its unit."""
    values = [net.get(cost.key) for net in nets]
    size, unit = cost.unit(values)
    return cost.axis.format(unit=unit), [None if value is None else value / size for value in values]
