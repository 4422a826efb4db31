"""The notes beneath the table of a bake-off: what was special about the run, and what its intervals support."""

from harness.reports.bakeoff import few_labels
from harness.reports.bakeoff.question import conclusions
from harness.reports.conclusions import lead
from harness.reports.endings import ended_early, failures, planned_epochs
from harness.reports.results import Results
from harness.reports.samples import labels, unpack_classes
from harness.reports.tables import NONE, join_words

# By the values of `--equal`, the figure that is equal, and its name.
BUDGETS = {"parameters": ("parameters", "parameters"), "flops": ("flops_token", "FLOPs")}


def notes(results: Results, concluded: bool = True) -> list[str]:
    """Return the notes beneath the table: what it shows, which students failed, what the intervals support.

    Without the latter where not `concluded`.
    """
    students, seeds, metric = results.students, results.seeds, results.metric
    lines = []
    if len(seeds) > 1:
        spread = f"± standard deviation over {len(seeds)} seeds{few_labels.what_differs(results)}"
        lines.append(f"{metric.word[0].upper()}{metric.word[1:]}: mean {spread}.")
    lines += [
        f"{name}: one net, tested once, which taught with every seed."
        for name, teacher in results.teachers.items()
        if teacher.nets < len(seeds)
    ]
    if (decay := results.config.get("ema")) is not None:
        lines.append(
            f"EMA: of moving averages of weights (ema {decay}), in each student's folder ema; all else is of "
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
        + few_labels.notes(results)
        + _kept_teacher(results)
        + _best_epochs(results)
        + ended_early(results)
    )
    lines += failures(seeds, {name: student.failed for name, student in students.items()})
    lines += one_class(results)
    baselines = dict.fromkeys(student.baseline for student in students.values())
    lines += conclusions(results) if concluded else []
    if (missing := [name for name in baselines if name not in students]) and len(students) > 1:
        without = "no differences are given" if len(missing) == len(baselines) else "its rows have no differences"
        lines += [f"No student is called {name}, so {without}." for name in missing]
    if results.config.get("zoo"):
        lines.append(lead([student.scores[metric.name] for student in students.values()], metric))
    return [line for line in lines if line]


def _equal(results: Results) -> list[str]:
    """Say which widths `equal` has chosen, and how far from the first net's budget the nets are."""
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
    return [f"equal {budget}: embed_dim, at the given number of heads, by the budget of {first}: {'; '.join(chosen)}."]


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
    chosen_by = f"its best epoch by {monitor} (the earliest of equals)"
    return [f"Each net has the weights of {chosen_by}, seed by seed: {epochs}."]


def one_class(results: Results) -> list[str]:
    """Name the nets that predict the same class for all test samples, and with which seeds."""
    single: dict[str, list[str]] = {}
    for name, net in results.nets.items():
        stored = zip(results.seeds, net.samples.get("test_predicted", ()), strict=False)
        seeds = [seed for seed, classes in stored if classes is not None and len({*unpack_classes(classes)}) == 1]
        if seeds and len({*labels(results)}) > 1:
            which = "every seed" if seeds == [*results.seeds] else join_words([f"seed {seed}" for seed in seeds])
            single.setdefault(which, []).append(name)
    listed = "; ".join(f"{join_words(names)} with {which}" for which, names in single.items())
    said = "their accuracy is that class's share of the test, and compares no methods"
    return [f"One class predicted for all test samples: {listed}; {said}."] if single else []
