"""The content of compare.json: a row for each run's student, compared with the first run's `ce` where that is fair."""

from collections.abc import Sequence
from typing import Any

from harness.reports.metrics import conclude, paired_differences, paired_interval
from harness.reports.pages import failures
from harness.reports.report import Facts
from harness.studies.compare.differences import differences, objectives_of, settings_of
from harness.studies.compare.fairness import other_settings, why_not_comparable
from harness.studies.compare.runs import FORMATS, Run

CONFOUNDED = "What differs between them may come from these: no verdict."
OF_A_ROW = ("objective", "parameters", "step_ms", "train_flops", "bytes", "latency_ms", "images_per_second")


def compare(runs: Sequence[Run]) -> Facts:
    """The content of compare.json; a run with other settings than the first's has intervals but no verdict."""
    first, kind, baseline = runs[0], runs[0].kind, runs[0].baseline
    base = dict(_by_seed(first, first.experiment.baseline)) if baseline else {}
    lacking = (
        f"{first.name}, the first run, has no student called {first.experiment.baseline}: no differences are given."
    )
    rows: list[Facts] = []
    notes = [] if baseline else [lacking]
    other = {run.name: other_settings(run, first) if kind.judged else {} for run in runs}
    confounded: dict[str, list[str]] = {}  # runs by the sentence on their settings
    for run in runs:
        reason = why_not_comparable(first, run) if baseline else ""
        if reason:
            notes.append(f"{run.name} is not compared with {baseline}: {reason}.")
        if flags := ", ".join(other[run.name]):
            said = f"and {first.name} differ in settings: {flags}.{'' if reason else f' {CONFOUNDED}'}"
            confounded.setdefault(said, []).append(run.name)
        rows += [_row(run, name, {} if reason else base) for name in run.entries]
        notes += failures({"seeds": run.seeds, "students": run.entries}, f"{run.name}/")
    notes += [f"{', '.join(names)} {said}" for said, names in confounded.items()]
    if baseline and any(set(run.seeds) != set(first.seeds) for run in runs):
        notes.append("Differences are paired over the seeds that a run has in common with the first.")
    if baseline and kind.judged:
        judged = [row for row in rows if row["name"] != baseline and not other[row["run"]]]
        notes.append(conclude(baseline, {row["name"]: row["differences"] for row in judged}, kind.metric))
    if kind is FORMATS:
        notes += _of_formats(runs)
    sources = [{"name": run.name, "folder": str(run.folder), "other_settings": other[run.name]} for run in runs]
    return {
        "experiment": "compare",
        "metric": kind.metric.name,
        "runs": sources,
        "baseline": baseline,
        "rows": rows,
        "notes": [note for note in notes if note],
        "settings": settings_of(runs),
        "objectives": objectives_of(runs),
        "differences": differences(runs),
    }


def _by_seed(run: Run, name: str) -> Any:
    """Pairs of a seed and the metric of a row."""
    return zip(run.seeds, run.entries[name][run.kind.metric.name], strict=True)


def _row(run: Run, name: str, base: dict[int, Any]) -> Facts:
    """A run's row; its differences are over the seeds in common with `base`, in the order there."""
    entry, metric = run.entries[name], run.kind.metric.name
    own = dict(_by_seed(run, name))
    common = [seed for seed in base if seed in own]
    found = paired_differences([own[seed] for seed in common], [base[seed] for seed in common])
    return {
        "name": f"{run.name}/{name}",
        "run": run.name,
        "student": name,
        "data": run.results["data"],
        "seeds": run.seeds,
        metric: entry[metric],
        **{key: entry[key] for key in OF_A_ROW if key in entry},
        "failed": entry.get("failed"),
        "differences": found,
        "delta": paired_interval(found),
    }


def _of_formats(runs: Sequence[Run]) -> list[str]:
    notes = ["One net a format: a difference has no interval, so nothing here says that it is more than noise."]
    machines = {repr(run.results["hardware"]) for run in runs}
    return notes + ["Latencies were measured on different machines: they don't compare."] * (len(machines) > 1)
