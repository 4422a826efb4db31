"""Finished runs side by side: a line for each run's student, compared with the first run's `ce` where that is fair."""

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from harness.config.sources import flat, free
from harness.reports.conclusion import conclude
from harness.reports.figures import Dot, metric_picture
from harness.reports.metrics import METRICS, Metric
from harness.reports.pages import cost_axis, failures, starred
from harness.reports.results import BASELINE, Facts, load_results, paired_differences, paired_interval
from harness.reports.tables import NONE, Table, count, flops_unit, listed, paragraph, short
from harness.runs.files import write_bytes, write_json, write_text

# Settings of data that choose no other samples, or choose them by a number that stands in `data`.
NOT_SAMPLES = {"batch_size", "augment", "train_size", "test_size", "validation_size", "num_workers"}
# Under these options of the Trainer the number in `data` is of what was used, and a setting says of what.
LIMITS = {"limit_val_batches": "validation_size", "limit_test_batches": "test_size"}
ONE_ROOT = {"Digits", "MNIST", "CIFAR10", "Shakespeare"}  # the same samples wherever they lie

TRAINING_DATA = {"data.batch_size", "data.augment"}  # settings of data that choose no samples, and change training
NOT_TRAINING = {
    "seeds", "only", "teacher_cache_mb", "variants",  # paired; each net is trained as if alone; the methods
    *(f"trainer.{name}" for name in ("num_sanity_val_steps", *LIMITS)),
}  # fmt: skip
CONFOUNDED = "What differs between them may come from these, not from a method: no verdict."


@dataclass
class Run:
    """A finished run's results under the name that tells it from the others."""

    name: str
    folder: Path
    results: Facts


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders, each named by as many of its last folders as tell it from the others.

    Raises:
        BadInput: a folder holds no finished run, or no bake-off, or is given twice.
    """
    paths = [Path(os.path.abspath(folder)) for folder in folders]  # noqa: PTH100 - `resolve` would rename links
    seen: set[Path] = set()
    for given, path in zip(folders, paths, strict=True):
        if path.resolve() in seen:
            raise BadInput("RUN", given, "each run once; this one is given twice")
        seen.add(path.resolve())
    results = [load_results(folder, "RUN") for folder in folders]
    for given, found in zip(folders, results, strict=True):
        if not found.get("students"):
            raise BadInput(
                "RUN", given, f"a run that has students; this one is of the experiment {found['experiment']}"
            )
        wanted = [results[0]["metric"].get("name")] if found is not results[0] else [*METRICS]
        if (name := found["metric"].get("name")) not in wanted:
            raise BadInput("RUN", given, f"a run measured by {' or '.join(wanted)}; this one has {name}")
    return [Run(*entry) for entry in zip(_names(paths), paths, results, strict=True)]


def _names(paths: Sequence[Path]) -> list[str]:
    def name(path: Path) -> str:
        others = [other.parts for other in paths if other != path]
        depth = 1
        while any(other[-depth:] == path.parts[-depth:] for other in others):
            depth += 1
        return "/".join(path.parts[-depth:])

    return [name(path) for path in paths]


def compare(runs: Sequence[Run]) -> Facts:
    """The content of compare.json: `metric`, `runs`, `baseline`, `rows` (one for each run's student) and `notes`.

    Runs may differ in the options of their methods. One that differs from the first in other settings too has intervals
    and no verdict.
    """
    first, metric = runs[0], runs[0].results["metric"]["name"]
    baseline = f"{first.name}/{BASELINE}" if BASELINE in first.results["students"] else None
    rows: list[Facts] = []
    notes = [] if baseline else [f"{first.name}, the first run, has no student called ce: no differences are given."]
    other = {run.name: _other_settings(run, first) for run in runs}
    for run in runs:
        reason = _why_not_comparable(first, run) if baseline else ""
        if reason:
            notes.append(f"{run.name} is not compared with {baseline}: {reason}.")
        if told := [f"{flag} {now}, not {was}" for flag, (now, was) in other[run.name].items()]:
            advice = "" if reason else f" {CONFOUNDED}"
            notes.append(f"{run.name} and {first.name} differ in settings: {'; '.join(told)}.{advice}")
        rows += [
            _row(run, student, first, comparable=bool(baseline and not reason)) for student in run.results["students"]
        ]
        notes += failures(run.results, f"{run.name}/")
    if baseline and any(set(run.results["seeds"]) != set(first.results["seeds"]) for run in runs):
        notes.append("Differences are paired over the seeds that a run has in common with the first.")
    if baseline:
        judged = [row for row in rows if row["name"] != baseline and not other[row["run"]]]
        notes.append(conclude(baseline, {row["name"]: row["differences"] for row in judged}, METRICS[metric]))
    sources = [{"name": run.name, "folder": str(run.folder), "other_settings": other[run.name]} for run in runs]
    return {
        "experiment": "compare",
        "metric": metric,
        "runs": sources,
        "baseline": baseline,
        "rows": rows,
        "notes": [note for note in notes if note],
    }


def _row(run: Run, student: str, first: Run, comparable: bool) -> Facts:
    entry, data, metric = run.results["students"][student], run.results["data"], first.results["metric"]["name"]
    differences = _differences(run, student, first) if comparable else []
    return {
        "name": f"{run.name}/{student}",
        "run": run.name,
        "student": student,
        "data": data,
        "seeds": run.results["seeds"],
        **{key: entry[key] for key in ("objective", "parameters", metric, "step_ms", "train_flops")},
        "failed": entry.get("failed"),
        "differences": differences,
        "delta": paired_interval(differences),
    }


def _differences(run: Run, student: str, first: Run) -> list[float]:
    """Over the common seeds, in the first run's order: the metric less that of the first run's `ce`."""
    metric = first.results["metric"]["name"]
    own = dict(zip(run.results["seeds"], run.results["students"][student][metric], strict=True))
    base = dict(zip(first.results["seeds"], first.results["students"][BASELINE][metric], strict=True))
    common = [seed for seed in base if seed in own]
    return paired_differences([own[seed] for seed in common], [base[seed] for seed in common])


def _why_not_comparable(first: Run, run: Run) -> str:
    """Empty if both runs had the same samples, and a seed in common."""
    limits = _limits(run.results) | _limits(first.results)
    ours, theirs = _samples(run.results, limits), _samples(first.results, limits)
    other = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if other:
        return f"other data ({', '.join(f'{key} {ours.get(key)}, not {theirs.get(key)}' for key in other)})"
    if not set(run.results["seeds"]) & set(first.results["seeds"]):
        return f"no seed in common ({listed([str(seed) for seed in run.results['seeds']])})"
    return ""


def _samples(results: Facts, limits: set[str]) -> Facts:
    """What decides which samples a run saw: the set, its sizes, and the settings that choose from it.

    Args:
        results: the run's.
        limits: under which this run or the one that it is compared with has used a part only.
    """
    data = _section(results, "data")
    given = data.get("init_args", data) or {}
    ignored = (NOT_SAMPLES - {LIMITS[name] for name in limits}) | {"class_path"}
    if results["data"].get("name") in ONE_ROOT:
        ignored.add("root")
    chosen = {f"data.{key}": value for key, value in given.items() if key not in ignored}
    sizes = dict(results["data"])
    if "limit_val_batches" in limits:
        sizes.pop("validation", None)  # what was held out is the same
    return {**sizes, **chosen}


def _limits(results: Facts) -> set[str]:
    """Those of the limits that are set; 1 is one batch, 1.0 all."""
    trainer = _section(results, "trainer")
    return {name for name in LIMITS if repr(trainer.get(name)) not in {"None", "1.0"}}


def _section(results: Facts, key: str) -> Facts:
    config: Any = results.get("config")
    section = config.get(key) if isinstance(config, dict) else None
    return section if isinstance(section, dict) else {}


def _other_settings(run: Run, first: Run) -> dict[str, tuple[Any, Any]]:
    """By flag, where the runs differ in how they trained, but for the methods' own options: this value and the first's.

    Which samples they had is another question. Of a class that differs the options are left out.
    """
    ours, theirs = (_training(each.results) for each in (run, first))
    differ = [flag for flag in {**theirs, **ours} if ours.get(flag) != theirs.get(flag)]
    inside = [flag for flag in differ if any(flag.startswith(f"{other}.") for other in differ)]
    return {flag: (ours.get(flag), theirs.get(flag)) for flag in differ if flag not in inside}


def _training(results: Facts) -> Facts:
    config: Any = results.get("config")
    settings = dict(flat(config)) if isinstance(config, dict) else {}
    settings = {flag: value for flag, value in settings.items() if not free(flag)}
    left_out = {"data", *NOT_TRAINING}
    return {
        flag: value
        for flag, value in settings.items()
        if flag in TRAINING_DATA or left_out.isdisjoint({flag, flag.partition(".")[0]})
    }


def table(comparison: Facts) -> Table:
    """One line for each run's student, in the order in which the runs were given."""
    rows, metric = comparison["rows"], _metric(comparison)
    size, unit = flops_unit([row["train_flops"] for row in rows])
    baseline = f" to {comparison['baseline']}" if len(comparison["baseline"] or "") < 12 else ""
    title = metric.columns[metric.name].removeprefix("test ")
    header = ["run/student", "data", "seeds", title, f"Δ{baseline}, {metric.unit}", "parameters", "step, ms"]
    header.append(f"cost, {unit}")
    cells = [
        [
            starred(row["name"], row),
            f"{row['data'].get('name')} {count(row['data'].get('train'))}",
            str(len(row["seeds"])),
            metric.mean(row[metric.name]),
            NONE if row["name"] == comparison["baseline"] else metric.difference(row["delta"]),
            count(row["parameters"]),
            short(row["step_ms"]),
            short(row["train_flops"] and row["train_flops"] / size),
        ]
        for row in rows
    ]
    return Table(header, cells, left=2)


def _metric(comparison: Facts) -> Metric:
    return METRICS[comparison["metric"]]


def _notes(comparison: Facts) -> list[str]:
    word = _metric(comparison).word.capitalize()
    legend = f"{word}: mean ± standard deviation over the seeds, on the test set."
    if comparison["baseline"]:
        legend += f" Δ: paired difference to {comparison['baseline']}, with its 95 % interval."
    return [legend, *comparison["notes"]]


def text(comparison: Facts) -> str:
    """The table for a terminal, with what it says beneath it."""
    return "\n".join([table(comparison).plain(), "", *map(paragraph, _notes(comparison))])


def save(comparison: Facts, out: str | Path | None = None) -> Path:
    """Write compare.md, compare.png and compare.json, and return their folder: `out`, or one under runs/compare/.

    Raises:
        BadInput: the folder can't be written.
    """
    folder = Path(out) if out else Path("runs", "compare", _short([run["name"] for run in comparison["runs"]]))
    sources = "\n".join(f"- {run['name']}: `{run['folder']}`" for run in comparison["runs"])
    page = ["# Runs compared", sources, table(comparison).markdown(), *_notes(comparison)]
    metric = _metric(comparison)
    page.append(f"![{metric.word}](compare.png)")
    label, costs = cost_axis(comparison["rows"])
    groups = [run["name"] for run in comparison["runs"]]
    lines = zip(comparison["rows"], costs, strict=True)
    dots = [Dot(row["name"], row[metric.name], cost, groups.index(row["run"]), metric) for row, cost in lines]
    picture = metric_picture(dots, label)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "compare.md", "\n\n".join(page) + "\n")
        write_bytes(folder / "compare.png", picture)
        write_json(folder / "compare.json", comparison)
    except OSError as error:
        raise BadInput("out", folder, f"a folder that can be written ({error.strerror})") from error
    return folder


def _short(names: Sequence[str]) -> str:
    """One folder name from the runs' names, the same for the same runs."""
    joined = "-".join(name.strip("/").replace("/", "_") for name in names)
    return joined if len(joined) <= 80 else f"{joined[:70]}-{zlib.crc32(joined.encode()):08x}"
