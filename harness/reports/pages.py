"""Pages of a comparison of students: the table on the terminal, results.md and results.png."""

from collections.abc import Iterable, Mapping, Sequence

from harness.reports import differences, tuning
from harness.reports.figures import Dot, metric_picture
from harness.reports.measures import COST, STEP, Figure, columns_on_page, in_table
from harness.reports.report import machine
from harness.reports.results import (
    NetResults,
    Results,
    Scores,
    StudentResults,
    TeacherResults,
    averaged_key,
    differences_to,
    name_baseline,
)  # fmt: skip
from harness.reports.settings import objectives, settings
from harness.reports.tables import NONE, Table, count, join_words, paragraph, table_of
from harness.reports.uncertainty import conclude, lead
from harness.runs.records import Failure, Header
from lit_modules.tasks import Metric

# By the values of `--equal`, the figure that is equal, and its name.
BUDGETS = {"parameters": ("parameters", "parameters"), "flops": ("flops_token", "FLOPs")}
MOST_NAMED = 6  # students in a question


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


def notes(results: Results, concluded: bool = True) -> list[str]:
    """Return the notes beneath the table: what it shows, which students failed, what the intervals support.

    Without the latter where not `concluded`.
    """
    students, seeds, metric = results.students, results.seeds, results.metric
    spread = f" ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else ""
    lines = [f"{metric.word[0].upper()}{metric.word[1:]}: mean{spread}." if spread else ""]
    lines += [
        f"{name}: one net, tested once, which taught with every seed."
        for name, teacher in results.teachers.items()
        if teacher.nets < len(seeds)
    ]
    if (decay := results.config.get("ema")) is not None:
        lines.append(
            f"EMA: of moving averages of weights (--ema {decay}), in each student's folder ema; all else is of "
            "the weights themselves."
        )
    lines += [f"{name}: taught by {of}." for name, student in students.items() if (of := student.taught_by)]
    lines += [
        f"{name}: its net became a {student.net}, which these figures are of."
        for name, student in students.items()
        if student.net
    ]
    lines += (
        _equal(results)
        + _labels(results)
        + _kept_teacher(results)
        + _best_epochs(results)
        + _budgets(results)
        + ended_early(results)
    )
    lines += failures(seeds, {name: student.failed for name, student in students.items()})
    baselines = dict.fromkeys(student.baseline for student in students.values())
    lines += conclusions(results) if concluded else []
    if (missing := [name for name in baselines if name not in students]) and len(students) > 1:
        without = "no differences are given" if len(missing) == len(baselines) else "its rows have no differences"
        lines += [f"No student is called {name}, so {without}." for name in missing]
    if results.config.get("zoo"):
        lines.append(lead([student.scores[metric.name] for student in students.values()], metric))
    return [line for line in lines if line]


def conclusions(results: Results) -> list[str]:
    """Say for each baseline which students differ from it, and how sure that is."""
    students, metric = results.students, results.metric
    sentences = []
    for baseline in dict.fromkeys(student.baseline for student in students.values()):
        if baseline in students:
            paired = differences_to(baseline, students, metric)
            others = {name: values for name, values in paired.items() if name != baseline}
            sentences.append(conclude(baseline, others, metric))
    return [sentence for sentence in sentences if sentence]


def question(results: Results) -> str:
    """Ask in words what the comparison answers."""
    students, labelled = results.students, _labelled(results)
    score = results.metric.title.partition(",")[0]
    where = f"On {results.data['name']}"
    if labelled is not None:
        where += f" with labels of {count(labelled)} of {count(results.data.get('train'))} training samples"
    baselines = {of.baseline: students[of.baseline] for of in students.values() if of.baseline in students}
    others = [name for name in students if name not in baselines]
    if not baselines or not others:
        return f"{where}: which {score} {'do' if len(students) > 1 else 'does'} {_some(list(students))} reach?"
    to = next(iter(baselines)) if len(baselines) == 1 else "the ce of the same net"
    alone = results.teacher and all(student.objective == "CrossEntropy" for student in baselines.values())
    which = f"{where}: is the {score} of {_some(others, 'or')} better than that of {to}"
    return f"{which}, which learns from labels alone?" if alone else f"{which}?"


def _some(names: Sequence[str], word: str = "and") -> str:
    """Name some students, or count many."""
    return join_words(names, word) if len(names) <= MOST_NAMED else f"{len(names)} students"


def _labelled(results: Results) -> int | None:
    """Return how many training samples have labels for the students, if that is not all."""
    labelled: int | None = (results.config.get("data") or {}).get("init_args", {}).get("labelled")
    return labelled


def _equal(results: Results) -> list[str]:
    """Say which widths `--equal` has chosen, and how far from the first net's budget the nets are."""
    if (budget := results.config.get("equal")) is None:
        return []
    first, key, words = results.baselines[0], *BUDGETS[budget]
    if (whole := results.students[first].figures.get(key)) is None:
        return []
    chosen = []
    for name, student in results.students.items():
        width, value = results.config["variants"][name]["init_args"]["embed_dim"], student.figures.get(key)
        if name != first and value is not None:
            chosen.append(f"{name} {width} ({100 * (value / whole - 1):+.1f} % {words})")
    return [
        f"--equal {budget}: embed_dim, at the given number of heads, by the budget of {first}: {'; '.join(chosen)}."
    ]


def _labels(results: Results) -> list[str]:
    """Say which labels students and teacher had, if the students had only some, or some are wrong."""
    config, total, labelled = results.config, results.data.get("train"), _labelled(results)
    noise, lines = (config.get("data") or {}).get("init_args", {}).get("label_noise"), []
    if labelled is not None:
        teacher = "was trained with all labels" if config.get("teacher_ckpt") is None else "was loaded"
        lines += [f"students: labels of {count(labelled)} of {count(total)} training samples; the teacher {teacher}."]
    if noise:
        lines += [f"label noise: {100 * noise:g} % of the training labels are another class, on purpose; no others."]
    return lines


def _kept_teacher(results: Results) -> list[str]:
    """Say for how many epochs the teacher was trained, if the run has grown since."""
    if results.teacher is None or results.config.get("teacher_epochs") is not None:
        return []
    epochs, now = results.teacher.max_epochs, planned_epochs(results)
    return [f"teacher: of {epochs} epochs; the run grew to {now} afterwards."] if epochs not in (None, now) else []


def _best_epochs(results: Results) -> list[str]:
    """Say by which epochs' weights nets are shown, where validation has chosen them."""
    if (monitor := results.config.get("best_epoch")) is None:
        return []
    chosen = {
        name: join_words([NONE if epoch is None else f"{epoch:.4g}" for epoch in net.best_epochs])
        for name, net in results.nets.items()
        if net.best_epochs
    }
    epochs = "; ".join(f"{name} {of_seeds}" for name, of_seeds in chosen.items())
    line = f"Each net has the weights of its best epoch by {monitor} (the earliest of equals), seed by seed: {epochs}."
    if results.config.get("student_seconds") is not None:
        line += (
            " What a student learns after its last whole epoch is not validated; without any it has its last weights."
        )
    return [line]


def _budgets(results: Results) -> list[str]:
    """Say what students' time was, and how many steps they took in it."""
    if (seconds := results.config.get("student_seconds")) is None:
        return []
    steps = {name: student.trained_steps for name, student in results.students.items() if student.trained_steps}
    counts = {name: join_words([NONE if n is None else count(n) for n in of_seeds]) for name, of_seeds in steps.items()}
    taken = "; ".join(f"{name} {of_seeds}" for name, of_seeds in counts.items()) or "none of them used it up"
    alone = (
        "each student had the time of so many steps of its own, timed alone on this machine, on which figures depend"
    )
    return [f"--student_seconds {seconds:g}: {alone}. Steps, seed by seed: {taken}."]


def planned_epochs(run: Header) -> int | None:
    """Return the epochs of a run's nets, as its settings have them."""
    epochs: int | None = (run.config.get("trainer") or {}).get("max_epochs")
    return epochs


def ended_early(run: Header) -> list[str]:
    """Say which nets of a run trained for fewer epochs than planned; nothing of other experiments."""
    if not isinstance(run, Results):
        return []
    students = {name: student.trained_epochs for name, student in run.students.items()}
    planned = dict.fromkeys(students, planned_epochs(run))
    if run.teacher is None:
        return say_epochs(students, planned) if run.config["trainer"].get("max_time") is not None else []
    planned = {"teacher": run.teacher.max_epochs, **planned}
    return say_epochs({"teacher": run.teacher.trained_epochs, **students}, planned)


def say_epochs(trained: Mapping[str, Scores], planned: Mapping[str, int | None]) -> list[str]:
    """Say which nets trained for fewer epochs than planned, and for how many; `trained` has those of each seed."""
    nets: dict[str, list[str]] = {}
    for name, of_seeds in trained.items():
        epochs = [number for number in of_seeds if number is not None]
        if any(number != planned[name] for number in epochs):
            of = f" of {planned[name]}" if (planned[name] or -1) > 0 else ""
            nets.setdefault(f"{join_words([f'{number:.4g}' for number in epochs])}{of} epochs", []).append(name)
    ended = "; ".join(f"{join_words(names)} after {epochs}" for epochs, names in nets.items())
    why = "by --early_stopping, --student_seconds, --trainer.max_time or max_steps, or a callback"
    return [f"Training ended early ({why}), seed by seed: {ended}."] if nets else []


def failures(seeds: Sequence[int], failed: Mapping[str, Sequence[Failure | None]]) -> list[str]:
    """Return one line for each student that failed with a seed, saying where."""
    lines = []
    for name, of_seeds in failed.items():
        pairs = zip(seeds, of_seeds, strict=False)
        if where := [f"seed {seed} (term {f.term}, step {f.step})" for seed, f in pairs if f]:
            left = len(seeds) - len(where)
            rest = f"its figures are over the {left} other seed{'s' * (left > 1)}" if left else "it has no figures"
            lines.append(f"* {name}: the loss stopped being finite with {join_words(where)}; {rest}.")
    return lines


def star_failed(name: str, failed: Sequence[Failure | None]) -> str:
    """Return the name in the table; a star points to the line of its failure."""
    return f"{name} *" if any(failed) else name


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
