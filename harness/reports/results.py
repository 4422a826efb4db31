"""results.json: what a bake-off measured, computed from the facts of each seed; and a finished run's file read back."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from harness.reports.metrics import ACCURACY, METRICS, Metric

Facts = dict[str, Any]
Interval = dict[str, float | None]
BASELINE = "ce"
CONFIDENCE = 0.95
STUDENT_KEYS = ("objective", "parameters", "step_ms", "train_flops")


def t_interval(values: Sequence[float]) -> Interval:
    """Mean of the values and its 95 % interval by Student's t, in their unit.

    Returns:
        {"mean", "low", "high"}: bounds are None for one value, all three for none; equal values give an interval of no
            width.
    """
    if not values:
        return {"mean": None, "low": None, "high": None}
    mean = statistics.mean(values)
    if len(values) == 1:
        return {"mean": mean, "low": None, "high": None}
    from scipy.special import stdtrit  # scipy.stats' own quantile, at a tenth of its import time

    half = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def paired_interval(differences: Sequence[float]) -> Interval:
    """`t_interval` of paired differences, one a seed.

    They are rounded to 12 digits first: 0.9 - 0.8 and 0.5 - 0.4 are the same difference, and float subtraction would
    give them a spread of 1e-16, an interval that excludes zero by nothing but rounding.
    """
    return t_interval([round(difference, 12) for difference in differences])


def paired_differences(values: Sequence[float | None], baseline: Sequence[float | None]) -> list[float]:
    """`values - baseline` of each seed in which both finished."""
    return [v - b for v, b in zip(values, baseline, strict=True) if v is not None and b is not None]


def bake_off_results(
    header: Facts,
    teacher: list[Facts],
    students: dict[str, list[Facts]],
    students_fit_seconds: list[float],
    metric: Metric = ACCURACY,
    one_teacher: bool = False,
) -> Facts:
    """The content of results.json. What can't be computed is None.

    Args:
        header: `experiment`, `data`, `hardware`, `versions`, `config`, `seeds`.
        teacher: for each seed `parameters`, what the metric says is tested (`test_acc` and `test_correct`),
            `fit_seconds`, `step_ms`, `train_flops`; the last three None for a loaded teacher.
        students: by name, for each seed `objective`, `parameters`, what is tested, `step_ms`, `train_flops` and
            `failed`: None, or {"step", "term"} where and in which term the loss stopped being finite.
        students_fit_seconds: for each seed, of all students together.
        metric: what they are judged by.
        one_teacher: whether the same net was loaded with each seed, so that its figures are one net's.

    Raises:
        ValueError: a list has not one entry a seed.
    """
    seeds = len(header["seeds"])
    lengths = {"teacher": len(teacher), "students_fit_seconds": len(students_fit_seconds)}
    for name, length in {**lengths, **{name: len(rows) for name, rows in students.items()}}.items():
        if length != seeds:
            raise ValueError(f"{name}: expected {seeds} entries, one a seed, got {length}")
    entries = {name: _student(rows, metric) for name, rows in students.items()}
    for entry in entries.values():
        baseline = entries[BASELINE][metric.name] if BASELINE in entries else None
        differences = paired_differences(entry[metric.name], baseline) if baseline is not None else []
        entry["delta_vs_ce"] = paired_interval(differences)
    return {
        **{key: header[key] for key in ("experiment", "data", "hardware", "versions", "config", "seeds")},
        "metric": {"name": metric.name, "higher_is_better": metric.higher_is_better},
        "students_fit_seconds": students_fit_seconds,
        "teacher": {
            "nets": 1 if one_teacher else seeds,
            "parameters": teacher[0]["parameters"],
            **{key: [facts[key] for facts in teacher] for key in (*metric.tested, "fit_seconds")},
            "step_ms": _median(facts["step_ms"] for facts in teacher),
            "train_flops": next((f["train_flops"] for f in teacher if f["train_flops"] is not None), None),
        },
        "students": entries,
    }


def _student(rows: list[Facts], metric: Metric) -> Facts:
    finished = [facts for facts in rows if not facts["failed"]]
    return {
        "objective": rows[0]["objective"],
        "parameters": rows[0]["parameters"],
        **{key: [None if f["failed"] else f[key] for f in rows] for key in metric.tested},
        "step_ms": _median(facts["step_ms"] for facts in rows),
        # A student that failed was frozen then: what it cost is no measure of the method.
        "train_flops": next((f["train_flops"] for f in finished if f["train_flops"] is not None), None),
        "delta_vs_ce": None,
        "failed": [facts["failed"] or None for facts in rows],
    }


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def load_results(folder: str | Path, flag: str = "run") -> Facts:
    """The results of a finished run, of any experiment.

    Args:
        folder: a run's `--out`.
        flag: the option that the folder came from, for the message.

    Raises:
        BadInput: naming the folder, where it is missing, unfinished, none of ours, or its file is damaged.
    """
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise BadInput(flag, folder, f"the folder of a finished run{_why_missing(Path(folder))}")
    try:
        results = json.loads(path.read_text("utf-8"), parse_constant=_refuse)
    except (ValueError, OSError) as error:
        raise BadInput(flag, folder, f"a readable results.json in it ({error})") from error
    if fault := _fault(results):
        raise BadInput(flag, folder, f"a results.json as our experiments write it ({fault})")
    return results


def _why_missing(folder: Path) -> str:
    if not folder.exists():
        return "; there is no such folder"
    if not folder.is_dir():
        return "; this is a file"
    if (folder / "config.yaml").exists():
        return f"; this run is unfinished, go on with it by `--out {folder} --resume true`"
    inner = sorted(path.parent for path in folder.glob("*/results.json"))
    hint = f"; did you mean {', '.join(map(str, inner[:3]))}{', …' if len(inner) > 3 else ''}?" if inner else ""
    return f"; there is no results.json in it{hint}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _fault(results: Any) -> str:
    """What is wrong with the shape of a file's content; empty if nothing is."""
    if not isinstance(results, dict) or not isinstance(results.get("experiment"), str):
        return "it does not name its experiment"
    if "students" not in results:
        return ""
    for key, kind in {"data": dict, "seeds": list, "metric": dict, "teacher": dict, "students": dict}.items():
        if not isinstance(results.get(key), kind):
            return f"{key} is missing or of another type"
    metric = METRICS.get(results["metric"].get("name"))
    faults = (_student_fault(entry, len(results["seeds"]), metric) for entry in results["students"].values())
    return next(
        (f"student {name} {fault}" for name, fault in zip(results["students"], faults, strict=True) if fault), ""
    )


def _student_fault(entry: Any, seeds: int, metric: Metric | None) -> str:
    """What is wrong with a student's entry; its values are not looked at where the metric is none of ours."""
    tested = [] if metric is None else [*metric.tested]
    if not isinstance(entry, dict) or any(key not in entry for key in (*STUDENT_KEYS, *tested)):
        return "is incomplete"
    for key in tested:
        if not isinstance(entry[key], list) or len(entry[key]) != seeds:
            return f"has not one {key} a seed"
        if not all(value is None or isinstance(value, int | float) for value in entry[key]):
            return f"has a {key} that is no number"
    return ""
