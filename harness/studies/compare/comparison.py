"""The content of compare.json: a row for each run's student, compared with the first run's `ce` where that is fair.

A student of several nets is compared with the first run's `ce` of the net of that name.
"""

import math
from collections.abc import Sequence
from typing import Any

from apprentice.errors import BadInput
from harness.reports.metrics import conclude, paired_differences
from harness.reports.pages import ended_early, failures
from harness.reports.report import Facts
from harness.reports.uncertainty import paired_interval
from harness.studies.compare.differences import differences, objectives_of, set_to, settings_of
from harness.studies.compare.fairness import other_settings, why_not_comparable
from harness.studies.compare.runs import FORMATS, Run

CONFOUNDED = "What differs between them may come from these: no verdict."
OF_A_ROW = ("objective", "parameters", "step_ms", "train_flops", "bytes", "latency_ms", "images_per_second")


def compare(runs: Sequence[Run], against: str | None = None) -> Facts:
    """The content of compare.json; a run with other settings than the first's has intervals but no verdict.

    Args:
        runs: at least one.
        against: a setting for the horizontal axis of the picture.

    Raises:
        BadInput: the runs don't have two numbers or more for this setting.
    """
    first, kind, baseline = runs[0], runs[0].kind, runs[0].baseline
    wanted = {
        run.name: {n: e.get("baseline", first.experiment.baseline) for n, e in run.entries.items()} for run in runs
    }
    found = dict.fromkeys(wanted[first.name].values())
    bases = {name: dict(_by_seed(first, name)) for name in found if name in first.entries}
    lacking = (
        f"{first.name}, the first run, has no student called {first.experiment.baseline}: no differences are given."
    )
    rows: list[Facts] = []
    notes = [] if bases else [lacking]
    other = {run.name: other_settings(run, first) if kind.judged else {} for run in runs}
    confounded: dict[str, list[str]] = {}  # runs by the sentence on their settings
    for run in runs:
        reason = why_not_comparable(first, run) if bases else ""
        if reason:
            notes.append(f"{run.name} is not compared with {baseline or first.name}: {reason}.")
        if flags := ", ".join(other[run.name]):
            said = f"and {first.name} differ in settings: {flags}.{'' if reason else f' {CONFOUNDED}'}"
            confounded.setdefault(said, []).append(run.name)
        rows += [_row(run, name, {} if reason else bases.get(to, {})) for name, to in wanted[run.name].items()]
        notes += [f"{run.name}: {line}" for line in ended_early(run.results)]
        notes += failures({"seeds": run.seeds, "students": run.entries}, f"{run.name}/")
    notes += [f"{', '.join(names)} {said}" for said, names in confounded.items()]
    if bases and any(set(run.seeds) != set(first.seeds) for run in runs):
        notes.append("Differences are paired over the seeds that a run has in common with the first.")
    for name in bases if kind.judged else ():
        to = f"{first.name}/{name}"
        own = [row for row in rows if wanted[row["run"]][row["student"]] == name and not other[row["run"]]]
        notes.append(conclude(to, {row["name"]: row["differences"] for row in own if row["name"] != to}, kind.metric))
    if kind is FORMATS:
        notes += _of_formats(runs)
    sources = [{"name": run.name, "folder": str(run.folder), "other_settings": other[run.name]} for run in runs]
    return {
        "experiment": "compare",
        "metric": kind.metric.name,
        **({"against": _axis(runs, against)} if against else {}),
        "runs": sources,
        "baseline": baseline,
        "rows": rows,
        "notes": [note for note in notes if note],
        "settings": settings_of(runs),
        "objectives": objectives_of(runs),
        "differences": differences(runs),
    }


def _axis(runs: Sequence[Run], setting: str) -> Facts:
    """The setting, and its number in each run as `values`."""
    values = {run.name: run.setting(setting) for run in runs}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadInput("against", setting, f"a setting with a number in each run; in {name} it is {set_to(value)}")
    if len({*values.values()}) < 2:
        raise BadInput(
            "against", setting, f"a setting in which runs differ; in all it is {next(iter(values.values()))}"
        )
    return {"setting": setting, "values": values}


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
        **{key: entry[key] for key in (*OF_A_ROW, "baseline") if key in entry},
        "failed": entry.get("failed"),
        "differences": found,
        "delta": paired_interval(found),
    }


def _of_formats(runs: Sequence[Run]) -> list[str]:
    notes = ["One net a format: a difference has no interval, so nothing here says that it is more than noise."]
    machines = {repr(run.results["hardware"]) for run in runs}
    return notes + ["Latencies were measured on different machines: they don't compare."] * (len(machines) > 1)
