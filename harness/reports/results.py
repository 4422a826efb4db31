"""results.json of a comparison of students: made from the facts of each seed, and read back."""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from apprentice.errors import BadInput
from harness.reports import samples
from harness.reports.metrics import ACCURACY, METRICS, Metric, paired_differences
from harness.reports.report import Facts
from harness.reports.uncertainty import paired_interval
from harness.runs.files import read_text

BASELINE = "ce"
LARGEST = 1e300  # of figures, so that sums of them are finite


def bake_off_results(
    header: Facts,  # `experiment`, `data`, `hardware`, `versions`, `config`, `seeds`, and names of the `classes`
    teacher: list[Facts],
    students: dict[str, list[Facts]],
    students_fit_seconds: list[float],  # for each seed, of all students together
    metric: Metric = ACCURACY,
    one_teacher: bool = False,  # whether each seed loaded the same net, so that its figures are those of one net
    variants: Mapping[str, str] = MappingProxyType({}),  # the methods of students whose names begin with a net's
    ranked: bool = False,  # whether the best student comes first
) -> Facts:
    """The content of results.json; None stands for what can't be computed.

    A teacher has for each seed `parameters`, the tested values, and `max_epochs`, `fit_seconds`, `step_ms`,
    `train_flops` (None if it was loaded); a student `objective`, `parameters`, the tested values, `step_ms`,
    `train_flops`, `failed`, and `net` if its objective has replaced the student's net. A student in `variants` has its
    `variant` and its `baseline` by name, too.

    Raises:
        ValueError: a list does not have one entry per seed.
    """
    seeds = len(header["seeds"])
    rows: dict[str, Sequence[Any]] = {"teacher": teacher, "students_fit_seconds": students_fit_seconds, **students}
    for name, entered in rows.items():
        if len(entered) != seeds:
            raise ValueError(f"{name}: expected {seeds} entries, one a seed, got {len(entered)}")
    entries = {name: entry_of(rows, metric) for name, rows in students.items()}
    for name, entry in entries.items():
        if (variant := variants.get(name, name)) != name:
            entry |= {"variant": variant, "baseline": name.removesuffix(variant) + BASELINE}
        own = baseline_of(entry)
        baseline = entries[own][metric.name] if own in entries else [None] * seeds
        entry["delta_vs_ce"] = paired_interval(paired_differences(entry[metric.name], baseline))
    if ranked:
        entries = dict(sorted(entries.items(), key=lambda item: _rank(item[1][metric.name], metric)))
    return {
        **header,
        "metric": {"name": metric.name, "higher_is_better": metric.higher_is_better},
        "students_fit_seconds": students_fit_seconds,
        "teacher": {
            "nets": 1 if one_teacher else seeds,
            "parameters": teacher[0]["parameters"],
            "max_epochs": teacher[0].get("max_epochs"),
            **{key: [facts[key] for facts in teacher] for key in (*metric.tested, "fit_seconds")},
            **_costs(teacher, teacher),
            "trained_epochs": [facts.get("trained_epochs") for facts in teacher],
            "epochs": [facts.get("epochs") for facts in teacher],
            **samples.kept(teacher),
            **samples.of_samples(teacher),
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


def entry_of(rows: list[Facts], metric: Metric) -> Facts:
    """The entry of a net from its facts of each seed; `delta_vs_ce` is None."""
    return {
        "objective": rows[0]["objective"],
        **{key: rows[0][key] for key in ("net",) if key in rows[0]},
        "parameters": rows[0]["parameters"],
        **{key: [None if f["failed"] else f[key] for f in rows] for key in metric.tested},
        # A student that failed was frozen then: what it cost is no measure of the method.
        **_costs(rows, [facts for facts in rows if not facts["failed"]]),
        "delta_vs_ce": None,
        "failed": [facts["failed"] or None for facts in rows],
        **samples.kept(rows),
        "trained_epochs": [None if facts["failed"] else facts.get("trained_epochs") for facts in rows],
        "epochs": [facts.get("epochs") for facts in rows],  # None in records of older versions
    }


def _costs(timed: Sequence[Facts], counted: Sequence[Facts]) -> Facts:
    milliseconds = [facts["step_ms"] for facts in timed if facts["step_ms"] is not None]
    flops = [facts["train_flops"] for facts in counted if facts["train_flops"] is not None]
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


def load_record(path: Path) -> Facts:
    """What `seed<k>/<fit>.json` says of a finished fit, of one net with the fit's name or of several students.

    Raises:
        BadInput: it can't be read, or something else is in it.
    """
    with reading(path, "out", "a record of a finished fit, or no such file, and the fit is repeated"):
        record: Facts = json.loads(read_text(path))
        if path.stem not in record["runs"] and not path.stem.startswith(("students", "rung")):
            raise LookupError(f"{path.stem} is not in it")
        figures = [record["fit_seconds"]]
        for facts in record["runs"].values():
            tested = [metric.tested for metric in METRICS.values() if set(metric.tested) <= facts.keys()]
            failed = facts["failed"] is None or {"step", "term"} <= facts["failed"].keys()
            if not (tested and failed and isinstance(facts["objective"], str)):
                raise TypeError("its nets are not recorded as ours")
            figures += [facts["parameters"] + 0, *(facts[key] for key in chain(("step_ms", "train_flops"), *tested))]
        if not all(figure is None or (type(figure) in {int, float} and abs(figure) < LARGEST) for figure in figures):
            raise TypeError("a figure is no number")
    return record


@contextmanager
def reading(
    folder: str | Path, flag: str, expected: str = "a readable results.json of our experiments in it"
) -> Iterator[None]:
    """Raise BadInput where the block does not find in a folder's results.json, or another file, what we write there."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(flag, folder, f"{expected} ({said})") from error


def _why_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "; this is a file" if folder.exists() else "; there is no such folder"
    if (folder / "config.yaml").exists():
        return f"; this run is unfinished, go on with it by `--out {folder} --resume true`"
    inner = sorted(path.parent for path in folder.glob("*/results.json"))
    hint = f"; did you mean {', '.join(map(str, inner[:3]))}{', …' if len(inner) > 3 else ''}?" if inner else ""
    return f"; there is no results.json in it{hint}"
