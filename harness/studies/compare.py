"""Finished runs side by side: a row for each run's student, compared with the first run's `ce` where that is fair."""

import itertools
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datamodules
from apprentice.errors import BadInput
from harness.config.sources import flat, free
from harness.reports.figures import Dot, metric_picture
from harness.reports.metrics import METRICS, conclude, paired_differences, paired_interval
from harness.reports.pages import cost_axis, costs, failures, starred
from harness.reports.report import Facts
from harness.reports.results import BASELINE, load_results, reading
from harness.reports.tables import NONE, Table, columns, count, listed, paragraph
from harness.runs.files import write_bytes, write_json, write_text

# With these options of the Trainer, `data` in results.json has the size of the part that was used.
LIMITS = {"validation": "limit_val_batches", "test": "limit_test_batches"}
NOT_TRAINING = {
    "seeds", "only", "teacher_cache_mb", "variants",  # paired; each net is trained as if alone; the methods
    *(f"trainer.{name}" for name in ("num_sanity_val_steps", *LIMITS.values())),
}  # fmt: skip
CONFOUNDED = "What differs between them may come from these, not from a method: no verdict."


@dataclass
class Run:
    """A finished run."""

    name: str  # the end of its path that tells it from the other runs
    folder: Path
    results: Facts  # its results.json
    settings: dict[str, Any]  # its configuration as flags and values

    @property
    def data(self) -> type[datamodules.InMemoryData]:
        """The class of its data; the base class where it is not one of ours."""
        return getattr(datamodules, str(self.results["data"]["name"]), datamodules.InMemoryData)


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders; BadInput if one holds no finished run, or one without students, or is given twice."""
    paths = [Path(os.path.abspath(folder)) for folder in folders]  # noqa: PTH100 - `resolve` would rename links
    runs: list[Run] = []
    for given, path in zip(folders, paths, strict=True):
        if path.resolve() in {run.folder.resolve() for run in runs}:
            raise BadInput("RUN", given, "each run once; this one is given twice")
        results = load_results(given, "RUN")
        if not results.get("students"):
            found = results["experiment"]
            raise BadInput("RUN", given, f"a run that has students; this one is of the experiment {found}")
        with reading(given, "RUN"):
            metric = str(results["metric"]["name"])
        wanted = [runs[0].results["metric"]["name"]] if runs else [*METRICS]
        if metric not in wanted:
            raise BadInput("RUN", given, f"a run measured by {' or '.join(wanted)}; this one has {metric}")
        others = [other.parts for other in paths if other != path]
        depth = next(end for end in itertools.count(1) if all(other[-end:] != path.parts[-end:] for other in others))
        with reading(given, "RUN"):
            config = dict(flat(results.get("config") or {}))
            if (epochs := results["teacher"].get("max_epochs")) not in (None, config.get("trainer.max_epochs")):
                config["teacher.max_epochs"] = epochs  # the run grew
            runs.append(Run("/".join(path.parts[-depth:]), path, results, config))
            table(compare([runs[0], runs[-1]]))  # whatever a row needs is there
    return runs


def compare(runs: Sequence[Run]) -> Facts:
    """The content of compare.json; a run with other settings than the first's has intervals but no verdict."""
    first, metric = runs[0], runs[0].results["metric"]["name"]
    baseline = f"{first.name}/{BASELINE}" if BASELINE in first.results["students"] else None
    base: dict[int, Any] = {}  # the baseline's metric by seed
    if baseline:
        base = dict(zip(first.results["seeds"], first.results["students"][BASELINE][metric], strict=True))
    rows: list[Facts] = []
    notes = [] if baseline else [f"{first.name}, the first run, has no student called ce: no differences are given."]
    other = {run.name: _other_settings(run, first) for run in runs}
    for run in runs:
        reason = _why_not_comparable(first, run) if baseline else ""
        if reason:
            notes.append(f"{run.name} is not compared with {baseline}: {reason}.")
        if differ := [f"{flag} {now}, not {was}" for flag, (now, was) in other[run.name].items()]:
            advice = "" if reason else f" {CONFOUNDED}"
            notes.append(f"{run.name} and {first.name} differ in settings: {'; '.join(differ)}.{advice}")
        rows += [_row(run, student, metric, {} if reason else base) for student in run.results["students"]]
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


def _row(run: Run, student: str, metric: str, base: dict[int, Any]) -> Facts:
    """A student's row; its differences are over the seeds in common with `base`, in the order there."""
    entry = run.results["students"][student]
    own = dict(zip(run.results["seeds"], entry[metric], strict=True))
    common = [seed for seed in base if seed in own]
    differences = paired_differences([own[seed] for seed in common], [base[seed] for seed in common])
    return {
        "name": f"{run.name}/{student}",
        "run": run.name,
        "student": student,
        "data": run.results["data"],
        "seeds": run.results["seeds"],
        **{key: entry[key] for key in ("objective", "parameters", metric, "step_ms", "train_flops")},
        "failed": entry.get("failed"),
        "differences": differences,
        "delta": paired_interval(differences),
    }


def _why_not_comparable(first: Run, run: Run) -> str:
    """Empty if both runs had the same samples, and a seed in common."""
    limits = [(part, each.settings.get(f"trainer.{flag}")) for part, flag in LIMITS.items() for each in (first, run)]
    limited = {part for part, limit in limits if repr(limit) not in {"None", "1.0"}}  # 1 is one batch, 1.0 all
    ours, theirs = _samples(run, limited), _samples(first, limited)
    other = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    if other:
        return f"other data ({', '.join(f'{key} {ours.get(key)}, not {theirs.get(key)}' for key in other)})"
    if not set(run.results["seeds"]) & set(first.results["seeds"]):
        return f"no seed in common ({listed([str(seed) for seed in run.results['seeds']])})"
    return ""


def _samples(run: Run, limited: set[str]) -> Facts:
    """What decides which samples a run saw: the data set, its sizes, and the settings that choose from it.

    Of `limited` parts one of the two runs used only some batches: there, the option for the size decides.
    """
    ignored = run.data.free_options | run.data.training_options
    ignored |= {f"{part}_size" for part in ("train", "validation", "test") if part not in limited}
    names = {flag: flag.removeprefix("data.").partition(".")[0] for flag in run.settings if flag.startswith("data.")}
    chosen = {flag: run.settings[flag] for flag, name in names.items() if name not in ignored}
    sizes = {key: value for key, value in run.results["data"].items() if key != "validation" or key not in limited}
    return {**sizes, **chosen}


def _other_settings(run: Run, first: Run) -> dict[str, tuple[Any, Any]]:
    """By flag, both values where the two trained differently other than in their methods' options.

    Where a class differs, its options are left out.
    """
    ours, theirs = _training(run), _training(first)
    differ = [flag for flag in {**theirs, **ours} if ours.get(flag) != theirs.get(flag)]
    inside = [flag for flag in differ if any(flag.startswith(f"{other}.") for other in differ)]
    return {flag: (ours.get(flag), theirs.get(flag)) for flag in differ if flag not in inside}


def _training(run: Run) -> Facts:
    data, left_out = {f"data.{name}" for name in run.data.training_options}, {"data", *NOT_TRAINING}
    return {
        flag: value
        for flag, value in run.settings.items()
        if not free(flag) and (flag in data or left_out.isdisjoint({flag, flag.partition(".")[0]}))
    }


def table(comparison: Facts) -> Table:
    """One line for each run's student, in the order of the runs."""
    rows, metric, baseline = comparison["rows"], METRICS[comparison["metric"]], comparison["baseline"]
    cells = {
        "run/student": lambda row: starred(row["name"], row),
        "data": lambda row: f"{row['data'].get('name')} {count(row['data'].get('train'))}",
        "seeds": lambda row: str(len(row["seeds"])),
        metric.columns[metric.name].removeprefix("test "): lambda row: metric.mean(row[metric.name]),
        f"Δ{f' to {baseline}' if len(baseline or '') < 12 else ''}, {metric.unit}": lambda row: (
            NONE if row["name"] == baseline else metric.difference(row["delta"])
        ),
        "parameters": lambda row: count(row["parameters"]),
        **costs(rows),
    }
    return columns(cells, rows, left=2)


def _notes(comparison: Facts) -> list[str]:
    word = METRICS[comparison["metric"]].word.capitalize()
    legend = f"{word}: mean ± standard deviation over the seeds, on the test set."
    if comparison["baseline"]:
        legend += f" Δ: paired difference to {comparison['baseline']}, with its 95 % interval."
    return [legend, *comparison["notes"]]


def text(comparison: Facts) -> str:
    """The table and its notes for a terminal."""
    return "\n".join([table(comparison).plain(), "", *map(paragraph, _notes(comparison))])


def save(comparison: Facts, out: str | Path | None = None) -> Path:
    """Write compare.md, compare.png and compare.json, and return their folder: `out`, or one under runs/compare/."""
    names, metric = [run["name"] for run in comparison["runs"]], METRICS[comparison["metric"]]
    joined = "-".join(name.strip("/").replace("/", "_") for name in names)
    short = joined if len(joined) <= 80 else f"{joined[:70]}-{zlib.crc32(joined.encode()):08x}"
    folder = Path(out) if out else Path("runs", "compare", short)
    sources = "\n".join(f"- {run['name']}: `{run['folder']}`" for run in comparison["runs"])
    page = ["# Runs compared", sources, table(comparison).markdown(), *_notes(comparison)]
    page.append(f"![{metric.word}](compare.png)")
    label, places = cost_axis(comparison["rows"])
    lines = zip(comparison["rows"], places, strict=True)
    dots = [Dot(row["name"], row[metric.name], place, names.index(row["run"]), metric) for row, place in lines]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "compare.md", "\n\n".join(page) + "\n")
        write_bytes(folder / "compare.png", metric_picture(dots, label))
        write_json(folder / "compare.json", comparison)
    except OSError as error:
        raise BadInput("out", folder, f"a folder that can be written ({error.strerror})") from error
    return folder
