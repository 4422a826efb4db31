"""What a page says in words: what was asked and found, and what was special about a run."""

from collections.abc import Mapping, Sequence

from harness.reports.results import Results, Scores, differences_to
from harness.reports.tables import NONE, count, join_words
from harness.reports.uncertainty import conclude, lead
from harness.runs.records import Failure, Header

# By the values of `--equal`, the figure that is equal, and its name.
BUDGETS = {"parameters": ("parameters", "parameters"), "flops": ("flops_token", "FLOPs")}
MOST_NAMED = 6  # students in a question


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
