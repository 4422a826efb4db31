"""Pages of a comparison of students: the table on the terminal, results.md and results.png."""

from collections.abc import Callable, Sequence
from functools import partial

from harness.reports import samples, tuning
from harness.reports.figures import Dot, metric_picture
from harness.reports.metrics import conclude, lead, paired_differences
from harness.reports.report import Facts, machine
from harness.reports.results import baseline_of
from harness.reports.settings import objectives, settings
from harness.reports.tables import NONE, Table, columns, count, flops_unit, listed, paragraph, short
from lit_modules.tasks import METRICS, Metric


def text(results: Facts) -> str:
    """The table and its notes for a terminal: plain text of at most 110 columns."""
    tuned = [tuning.table(results).plain()] if "tuning" in results else []
    said = "\n".join(map(paragraph, [*notes(results), *tuning.notes(results)]))
    return "\n\n".join(filter(None, [table(results).plain(), *tuned, said]))


def markdown(results: Facts) -> str:
    """results.md: what was run, the table, its notes, what each student learnt by, the picture."""
    drawn = "![{0}, and {0} against cost](results.png)".format(_metric(results).word)
    learnt = "\n".join(f"- {name}: {objective}" for name, objective in objectives(results).items())
    parts = [
        header(results),
        table(results).markdown(),
        *notes(results),
        *_another_test_set(results),
        f"Objectives of the students:\n\n{learnt}",
        drawn,
        *_tuned(results),
    ]
    return "\n\n".join(parts) + "\n"


def _another_test_set(results: Facts) -> list[str]:
    """The intervals that stand for another test set of this size, too; nothing where none can be given."""
    students, metric = results["students"], _metric(results)
    rows = []
    for name, entry in students.items():
        own = baseline_of(entry)
        if name == own or own not in students:
            continue
        found = samples.both(results, name, own, metric)
        if found is not None and found["low"] is not None:
            rows.append([name, metric.difference(entry["delta_vs_ce"]), metric.difference(found)])
    if not rows:
        return []
    header = ["variant", f"Δ over seeds, {metric.unit}", f"Δ over seeds and test {metric.counted}, {metric.unit}"]
    said = (
        "Intervals over seeds are of this test set; those over seeds and samples together hold for others of its size."
    )
    return [said, Table(header, rows).markdown()]


def _tuned(results: Facts) -> list[str]:
    if "tuning" not in results:
        return []
    drawn = f"![validation against each option]({tuning.PICTURE})"
    return ["## Tuning", tuning.table(results).markdown(), *tuning.notes(results), drawn]


def header(results: Facts) -> str:
    """The head of results.md: what was run, on what."""
    data = results["data"]
    sizes = [f"{count(data[part])} {part}" for part in ("train", "validation", "test") if data.get(part) is not None]
    facts = {
        "Data": f"{data['name']}: {', '.join(sizes)} {_metric(results).counted}",
        "Seeds": ", ".join(map(str, results["seeds"])),
        "Pooled from": ", ".join(results.get("pooled", ())),
        "Settings": "; ".join(settings(results["config"], results["free"])),
        **machine(results),
    }
    lines = "\n".join(f"- {name}: {value}" for name, value in facts.items() if value)
    return f"# {results['experiment']} on {data['name']}\n\n{lines}"


def table(results: Facts) -> Table:
    """One line for the teacher and one for each student."""
    metric, rows = _metric(results), [{"name": "teacher", **results["teacher"]}]
    rows += [{"name": name, **entry} for name, entry in results["students"].items()]

    def mean(key: str, row: Facts) -> str:
        return metric.mean(row[key][: row.get("nets")])

    cells: dict[str, Callable[[Facts], str]] = {
        "variant": lambda row: starred(row["name"], row),
        "objective": lambda row: row.get("objective", NONE),
        "parameters": lambda row: count(row["parameters"]),
        **{title: partial(mean, key) for key, title in metric.columns.items()},
        f"Δ to ce, {metric.unit}": lambda row: (
            NONE
            if row["name"] == baseline_of(row) or "delta_vs_ce" not in row
            else metric.difference(row["delta_vs_ce"])
        ),
        **costs(rows),
    }
    return columns(cells, rows, left=2)


def costs(rows: Sequence[Facts]) -> dict[str, Callable[[Facts], str]]:
    """The columns of these rows' costs: milliseconds a step, FLOPs of training."""
    size, unit = flops_unit([row["train_flops"] for row in rows])
    return {
        "step, ms": lambda row: short(row["step_ms"]),
        f"cost, {unit}": lambda row: short(row["train_flops"] and row["train_flops"] / size),
    }


def notes(results: Facts) -> list[str]:
    """The notes beneath the table: what it shows, which students failed, what the intervals support."""
    students, seeds, metric = results["students"], results["seeds"], _metric(results)
    spread = f" ± standard deviation over {len(seeds)} seeds" if len(seeds) > 1 else ""
    lines = [f"{metric.word.capitalize()}: mean{spread}." if spread else ""]
    if results["teacher"].get("nets", len(seeds)) < len(seeds):
        lines.append("teacher: one net, tested once, which taught with every seed.")
    lines += [
        f"{name}: its net became a {e['net']}, which these figures are of."
        for name, e in students.items()
        if "net" in e
    ]
    lines += _labels(results) + _kept_teacher(results) + ended_early(results)
    lines += failures(results)
    baselines = dict.fromkeys(map(baseline_of, students.values()))
    for baseline in (name for name in baselines if name in students):
        own = {n: e[metric.name] for n, e in students.items() if baseline_of(e) == baseline != n}
        others = {n: paired_differences(values, students[baseline][metric.name]) for n, values in own.items()}
        lines.append(conclude(baseline, others, metric))
    if (missing := [name for name in baselines if name not in students]) and len(students) > 1:
        differences = "no differences are given" if len(missing) == len(baselines) else "its rows have no differences"
        lines += [f"No student is called {name}, so {differences}." for name in missing]
    if results["config"].get("zoo"):
        lines.append(lead([entry[metric.name] for entry in students.values()], metric))
    return [line for line in lines if line]


def _labels(results: Facts) -> list[str]:
    """A line that says which labels students and teacher had, if the students had only some."""
    config, total = results["config"], results["data"].get("train")
    labelled = (config.get("data") or {}).get("init_args", {}).get("labelled")
    if labelled is None:
        return []
    teacher = "was trained with all labels" if config.get("teacher_ckpt") is None else "was loaded"
    return [f"students: labels of {count(labelled)} of {count(total)} training samples; the teacher {teacher}."]


def _kept_teacher(results: Facts) -> list[str]:
    """A line that says for how many epochs the teacher was trained, if the run has grown since."""
    epochs, now = results["teacher"].get("max_epochs"), results["config"].get("trainer", {}).get("max_epochs")
    if results["config"].get("teacher_epochs") is not None:
        return []
    return [f"teacher: of {epochs} epochs; the run grew to {now} afterwards."] if epochs not in (None, now) else []


def ended_early(results: Facts) -> list[str]:
    """A line that says after how many epochs nets ended that did not train for as many as planned."""
    planned = ((results.get("config") or {}).get("trainer") or {}).get("max_epochs")
    rows = {name: (entry, planned) for name, entry in results.get("students", {}).items()}
    if "teacher" in results:
        rows = {"teacher": (results["teacher"], results["teacher"].get("max_epochs")), **rows}
    nets: dict[str, list[str]] = {}
    for name, (entry, epochs) in rows.items():
        trained = [each for each in entry.get("trained_epochs") or [] if each is not None]
        if any(each != epochs for each in trained):
            of = f" of {epochs}" if (epochs or -1) > 0 else ""
            nets.setdefault(f"{listed([f'{each:.4g}' for each in trained])}{of} epochs", []).append(name)
    ended = "; ".join(f"{listed(names)} after {epochs}" for epochs, names in nets.items())
    why = "by --trainer.max_time or max_steps, or a callback"
    return [f"Training ended early ({why}), seed by seed: {ended}."] if nets else []


def failures(results: Facts, prefix: str = "") -> list[str]:
    """One line for each student that failed, saying where; `prefix` comes before its name."""
    lines, seeds = [], results["seeds"]
    for name, entry in results["students"].items():
        failed = zip(seeds, entry.get("failed") or [], strict=False)
        if where := [f"seed {seed} (term {f['term']}, step {f['step']})" for seed, f in failed if f]:
            left = len(seeds) - len(where)
            rest = f"its figures are over the {left} other seed{'s' * (left > 1)}" if left else "it has no figures"
            lines.append(f"* {prefix}{name}: the loss stopped being finite with {listed(where)}; {rest}.")
    return lines


def starred(name: str, entry: Facts) -> str:
    """The name in the table; a star points to the line of its failure."""
    return f"{name} *" if any(entry.get("failed") or []) else name


def picture(results: Facts) -> bytes:
    """results.png: the metric with its intervals, and against the cost of training."""
    teacher, students, metric = results["teacher"], results["students"], _metric(results)
    label, places = cost_axis(list(students.values()), teacher)
    entries = zip(students.items(), places, strict=True)
    dots = [Dot(name, e[metric.name], place, group, metric) for group, ((name, e), place) in enumerate(entries)]
    known = metric.scaled(teacher[metric.name])
    return metric_picture(dots, label, sum(known) / len(known) if known else None)


def _metric(results: Facts) -> Metric:
    return METRICS[results["metric"]["name"]]


def cost_axis(entries: list[Facts], *others: Facts) -> tuple[str, list[float | None]]:
    """Label and values of the cost axis: FLOPs of training, in a unit for `others` too, or milliseconds a step."""
    flops = [entry["train_flops"] for entry in entries]
    if all(value is None for value in flops):
        return "own training step, ms", [entry["step_ms"] for entry in entries]
    size, unit = flops_unit([*flops, *(entry["train_flops"] for entry in others)])
    return f"cost of training, {unit}", [None if value is None else value / size for value in flops]
