"""Finished runs, and what of them is compared: rows by name, each with a value for every seed."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datamodules
from apprentice.errors import BadInput
from harness.cli.sources import flat
from harness.reports.report import Facts
from harness.reports.results import BASELINE, entry_of, load_results
from harness.runs.records import NetRecord, reading
from lit_modules.tasks import ACCURACY, BITS, METRICS, Metric


@dataclass(frozen=True)
class Kind:
    """Runs that one table can hold.

    Args:
        title: which runs these are, in a message.
        metric: what they are measured by.
        judged: whether rows have several seeds, so that a difference can be told from noise.
    """

    title: str
    metric: Metric
    judged: bool = True


STUDENTS = [Kind(f"a run of kd.py measured by {metric.word}", metric) for metric in METRICS.values()]
TEXTS = Kind("a run of gpt.py, or of kd.py with --data Text", BITS)
FORMATS = Kind("a run of quantize.py", ACCURACY, judged=False)
MEASURED = {kind.metric.name: kind for kind in (*STUDENTS, TEXTS)}


@dataclass(frozen=True)
class Experiment:
    """How the runs of an experiment are compared.

    Args:
        rows: from results.json to entries by name, in the form of a bake-off's students.
        baseline: the row of the first run that differences are to.
        methods: settings that are compared; where these alone differ there is a verdict.
        idle: settings that move no figure of a row.
    """

    rows: Callable[[Facts], dict[str, Facts]]
    baseline: str
    methods: frozenset[str]
    idle: frozenset[str] = frozenset()


def _formats(results: Facts) -> dict[str, Facts]:
    return {row["format"]: {**row, "test_acc": [row["test_acc"]]} for row in results["rows"]}


def _language_model(results: Facts) -> dict[str, Facts]:
    return {"gpt": entry_of([NetRecord.from_json(net) for net in results["runs"]], BITS)}


EXPERIMENTS = {
    "kd": Experiment(
        lambda results: results["students"], BASELINE, frozenset({"variants"}),
        frozenset({"only", "zoo", "recipe", "metric", "teacher_cache_mb", "teacher_cache_dir"}),
    ),
    "gpt": Experiment(
        _language_model, "gpt", frozenset({"net", "model"}),
        frozenset({"sample", "run", "samples", "temperature", "top_k", "sample_seed"}),
    ),
    "quantize": Experiment(_formats, "float32", frozenset()),
}  # fmt: skip


@dataclass
class Run:
    """A finished run."""

    name: str  # the end of its path that tells it from the other runs
    folder: Path
    results: Facts  # its results.json
    kind: Kind
    experiment: Experiment

    def __post_init__(self) -> None:
        self.config: Facts = _with_teachers_epochs(self.results)
        self.settings = {**dict(flat(self.config)), "data": self.results["data"]["name"]}  # as flags and values
        self.free: list[str] = self.results["free"]
        self.seeds: list[int] = self.results["seeds"] if self.kind.judged else self.config["seeds"]
        self.entries = self.experiment.rows(self.results)  # of its rows, by name

    @property
    def baseline(self) -> str | None:
        """The name of the row that others are compared with, if there is one."""
        name = self.experiment.baseline
        return f"{self.name}/{name}" if name in self.entries else None

    def is_free(self, flag: str) -> bool:
        """Whether no result depends on a setting, or on what it is an option of."""
        return any(flag == name or flag.startswith(f"{name}.") for name in self.free)

    @property
    def data(self) -> type[datamodules.InMemoryData]:
        """The class of its data; the base class where it is not one of ours."""
        return getattr(datamodules, str(self.results["data"]["name"]), datamodules.InMemoryData)

    def setting(self, flag: str) -> Any:
        """A setting as results.json has it; None where it is unset or unknown."""
        value: Any = self.config
        for part in flag.split("."):
            if isinstance(value, list):
                value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
            else:
                value = (value.get("init_args", value) or {}).get(part) if isinstance(value, dict) else None
        return value


def _with_teachers_epochs(results: Facts) -> Facts:
    """The configuration; in that of a run that has grown by epochs, those of its teachers are an option of theirs."""
    config: Facts = results.get("config") or {}
    epochs, teacher = results.get("teacher", {}).get("max_epochs"), config.get("teacher")
    if not isinstance(teacher, dict) or epochs in (None, config.get("trainer", {}).get("max_epochs")):
        return config
    return config | {"teacher": teacher | {"init_args": (teacher.get("init_args") or {}) | {"max_epochs": epochs}}}


def load_run(given: str | Path, path: Path, name: str, like: Run | None = None) -> Run:
    """The run in a folder; BadInput if there is none that can be compared with the run `like`, if given."""
    results = load_results(given, "RUN")
    found = " ".join(results["experiment"].split())[:40]
    experiment = "kd" if results.get("students") else found  # an experiment of the user's own may have students
    if experiment not in EXPERIMENTS:
        raise BadInput("RUN", given, f"a run of kd.py, gpt.py or quantize.py; this one is of {found}.py")
    with reading(given, "RUN"):
        metric = ACCURACY.name if experiment == "quantize" else str(results["metric"]["name"])
    if metric not in METRICS:
        raise BadInput("RUN", given, f"a run measured by {' or '.join(METRICS)}; this one has {metric}")
    kind = FORMATS if experiment == "quantize" else MEASURED[metric]
    if like and kind is not like.kind:
        expected = f"{like.kind.title}, to compare with {like.name}"
        raise BadInput("RUN", given, f"{expected}; this one is of {found}.py, measured by {kind.metric.word}")
    with reading(given, "RUN"):
        return Run(name, path, results, kind, EXPERIMENTS[experiment])
