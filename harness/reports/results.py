"""results.json of a comparison of students: made from the facts of each seed, and read back."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from apprentice.errors import BadInput
from harness.reports import samples
from harness.reports.metrics import ACCURACY, Metric, paired_differences
from harness.reports.report import Facts
from harness.reports.uncertainty import paired_interval
from harness.runs.records import FitRecord, NetRecord, reading

BASELINE = "ce"


def bake_off_results(
    header: Facts,  # `experiment`, `data`, `hardware`, `versions`, `config`, `seeds`, and names of the `classes`
    teachers: Sequence[FitRecord],
    students: Mapping[str, Sequence[NetRecord]],
    students_fit_seconds: list[float],  # for each seed, of all students together
    metric: Metric = ACCURACY,
    one_teacher: bool = False,  # whether each seed loaded the same net, so that its figures are those of one net
    variants: Mapping[str, str] = MappingProxyType({}),  # the methods of students whose names begin with a net's
    ranked: bool = False,  # whether the best student comes first
) -> Facts:
    """Combine the records of each seed to the content of results.json; None stands for what can't be computed.

    A student in `variants` has its `variant` and its `baseline` by name, too.

    Raises:
        ValueError: a list does not have one entry per seed.
    """
    seeds = len(header["seeds"])
    rows: dict[str, Sequence[Any]] = {"teacher": teachers, "students_fit_seconds": students_fit_seconds, **students}
    for name, entered in rows.items():
        if len(entered) != seeds:
            raise ValueError(f"{name}: expected {seeds} entries, one a seed, got {len(entered)}")
    entries = {name: entry_of(records, metric) for name, records in students.items()}
    for name, entry in entries.items():
        if (variant := variants.get(name, name)) != name:
            entry |= {"variant": variant, "baseline": name.removesuffix(variant) + BASELINE}
        own = baseline_of(entry)
        baseline = entries[own][metric.name] if own in entries else [None] * seeds
        entry["delta_vs_ce"] = paired_interval(paired_differences(entry[metric.name], baseline))
    if ranked:
        entries = dict(sorted(entries.items(), key=lambda item: _rank(item[1][metric.name], metric)))
    nets = [teacher.nets["teacher"] for teacher in teachers]
    return {
        **header,
        "metric": {"name": metric.name, "higher_is_better": metric.higher_is_better},
        "students_fit_seconds": students_fit_seconds,
        "teacher": {
            "nets": 1 if one_teacher else seeds,
            "parameters": nets[0].figures["parameters"],
            "max_epochs": teachers[0].max_epochs,
            **{key: [net.figures[key] for net in nets] for key in metric.tested},
            "fit_seconds": [teacher.fit_seconds for teacher in teachers],
            **_costs(nets, nets),
            "trained_epochs": [net.trained_epochs for net in nets],
            "epochs": [net.epochs for net in nets],
            **samples.kept(nets),
            **samples.of_samples(nets),
        },
        "students": entries,
    }


def _rank(values: Sequence[float | None], metric: Metric) -> float:
    """A number that is smaller for better values, and largest for none."""
    known = metric.scaled(values)
    return statistics.mean(known) * (-1 if metric.higher_is_better else 1) if known else math.inf


def baseline_of(entry: Facts) -> str:
    """The name of the student that a student's differences are to, where it is not written the only `ce`."""
    return str(entry.get("baseline", BASELINE))


def entry_of(records: Sequence[NetRecord], metric: Metric) -> Facts:
    """The entry of a net from its records of each seed; `delta_vs_ce` is None."""
    first = records[0]
    return {
        "objective": first.objective,
        **({"net": first.net} if first.net else {}),
        "parameters": first.figures["parameters"],
        **{key: [None if net.failed else net.figures[key] for net in records] for key in metric.tested},
        # A student that failed was frozen then: what it cost is no measure of the method.
        **_costs(records, [net for net in records if not net.failed]),
        "delta_vs_ce": None,
        "failed": [net.failed and asdict(net.failed) for net in records],
        **samples.kept(records),
        "trained_epochs": [None if net.failed else net.trained_epochs for net in records],
        "epochs": [net.epochs for net in records],
    }


def _costs(timed: Sequence[NetRecord], counted: Sequence[NetRecord]) -> Facts:
    milliseconds = [ms for net in timed if (ms := net.figures["step_ms"]) is not None]
    flops = [count for net in counted if (count := net.figures["train_flops"]) is not None]
    return {
        "step_ms": statistics.median(milliseconds) if milliseconds else None,
        "train_flops": next(iter(flops), None),
    }


def load_results(folder: str | Path, flag: str = "run") -> Facts:
    """The results of a finished run; BadInput if its folder, which `flag` named, has no results.json of ours."""
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise BadInput(flag, folder, f"the folder of a finished run{_why_missing(Path(folder))}")
    with reading(folder, flag):
        results = json.loads(path.read_text("utf-8"))
        if not isinstance(results["experiment"], str):
            raise TypeError("it does not name its experiment")
    return results


def _why_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "; this is a file" if folder.exists() else "; there is no such folder"
    if (folder / "config.yaml").exists():
        return f"; this run is unfinished, go on with it by `--out {folder} --resume true`"
    inner = sorted(path.parent for path in folder.glob("*/results.json"))
    hint = f"; did you mean {', '.join(map(str, inner[:3]))}{', …' if len(inner) > 3 else ''}?" if inner else ""
    return f"; there is no results.json in it{hint}"
