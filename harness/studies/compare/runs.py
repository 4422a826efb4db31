"""Finished runs, and what of them is compared: rows by name, each with a value for every seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datamodules
from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from harness.cli.sources import flat
from harness.reports.combine import combine_student
from harness.reports.endings import planned_epochs
from harness.reports.results import BASELINE, Results, StudentResults, load_results
from harness.reports.settings import OF_TABLE
from harness.runs.records import Header, NetRecord, reading
from lit_modules.tasks import ACCURACY, BITS, METRICS, Metric, metric_of


@dataclass(kw_only=True)
class FormatResults(StudentResults):
    """A format of quantize.py, as a student; by batch size its latencies."""

    latency_ms: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Experiment:
    """How the runs of an experiment are compared."""

    # From results.json to what is in it, and to its rows by name.
    read: Callable[[Mapping[str, Any]], tuple[Header, Mapping[str, StudentResults]]]
    baseline: str  # the row of the first run that differences are to
    methods: frozenset[str]  # settings that are compared; where these alone differ there is a verdict
    idle: frozenset[str] = frozenset()  # settings that move no figure of a row
    judged: bool = True  # whether rows have several seeds, so that a difference can be told from noise


def _students(facts: Mapping[str, Any]) -> tuple[Results, Mapping[str, StudentResults]]:
    results = Results.read(facts)
    return results, results.students


def _language_model(facts: Mapping[str, Any]) -> tuple[Header, Mapping[str, StudentResults]]:
    if "runs" not in facts:
        return _students(facts)
    net = combine_student([NetRecord.from_json(run) for run in facts["runs"]], BITS)
    return Header.read(facts), {"gpt": net}


def _formats(facts: Mapping[str, Any]) -> tuple[Header, Mapping[str, StudentResults]]:
    header = Header.read({"seeds": facts["config"]["seeds"], **facts})
    rows = {
        row["format"]: FormatResults(
            objective="",
            figures={key: row[key] for key in ("bytes", "images_per_second")},
            scores={"test_acc": [row["test_acc"]]},
            latency_ms=row["latency_ms"],
        )
        for row in facts["rows"]
    }
    return header, rows


OF_WRITING = frozenset({"sample", "run", "samples", "temperature", "top_k", "sample_seed", "decode_at"})
EXPERIMENTS = {
    "kd": Experiment(
        _students, BASELINE, frozenset({"variants"}),
        OF_TABLE | {"teacher_cache_mb", "teacher_cache_dir"},
    ),
    "variants": Experiment(_students, BASELINE, frozenset({"variants", "equal"}), OF_TABLE | OF_WRITING),
    "gpt": Experiment(
        _language_model, "gpt", frozenset({"net", "model"}),
        OF_WRITING,
    ),
    "quantize": Experiment(_formats, "float32", frozenset(), judged=False),
}  # fmt: skip


@dataclass
class Run:
    """A finished run."""

    name: str  # the end of its path that tells it from the other runs
    folder: Path
    results: Header  # `Results` of students
    entries: Mapping[str, StudentResults]  # its rows by name
    metric: Metric
    experiment: Experiment

    def __post_init__(self) -> None:
        self.config = _with_teachers_epochs(self.results)
        self.settings = {**dict(flat(self.config)), "data": self.results.data["name"]}  # as flags and values
        self.seeds = self.results.seeds

    @property
    def baseline(self) -> str | None:
        """The name of the row that others are compared with, if there is one."""
        name = self.experiment.baseline
        return f"{self.name}/{name}" if name in self.entries else None

    @property
    def kind(self) -> str:
        """Which runs one table can hold beside it, in words."""
        if not self.experiment.judged:
            return "a run of quantize.py"
        texts = "a run of gpt.py, or of kd.py on texts"
        return texts if self.metric is BITS else f"a run of kd.py measured by {self.metric.word}"

    def is_free(self, flag: str) -> bool:
        """Return whether no result depends on a setting, or on what it is an option of."""
        return any(flag == name or flag.startswith(f"{name}.") for name in self.results.free)

    @property
    def data(self) -> type[InMemoryData]:
        """The class of its data; the base class where it is not one of ours."""
        return getattr(datamodules, str(self.results.data["name"]), InMemoryData)

    @property
    def classes(self) -> Sequence[str]:
        return self.results.classes if isinstance(self.results, Results) else ()

    def setting(self, flag: str) -> Any:
        """Return a setting as results.json has it; None where it is unset or unknown."""
        value: Any = self.config
        for part in flag.split("."):
            if isinstance(value, list):
                value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
            else:
                value = (value.get("init_args", value) or {}).get(part) if isinstance(value, dict) else None
        return value


def _with_teachers_epochs(results: Header) -> dict[str, Any]:
    """Return the configuration; in a run that has grown by epochs, the teacher's epochs become its option."""
    config, teacher = results.config, results.config.get("teacher")
    epochs = results.teacher.max_epochs if isinstance(results, Results) and results.teacher else None
    if not isinstance(teacher, dict) or epochs in (None, planned_epochs(results)):
        return config
    return config | {"teacher": teacher | {"init_args": (teacher.get("init_args") or {}) | {"max_epochs": epochs}}}


def load_run(folder: str | Path, path: Path, name: str, like: Run | None = None) -> Run:
    """Load the run in a folder; BadInput if there is none that can be compared with the run `like`, if given."""
    facts = load_results(folder, "RUN")
    script = " ".join(facts["experiment"].split())[:40]
    config = facts.get("config")
    is_alone = isinstance(config, Mapping) and not config.get("variants")
    of_students = "kd" if "teacher" in facts else "gpt" if is_alone else "variants"
    experiment = of_students if facts.get("students") else script  # an experiment of the user's own may have students
    if experiment not in EXPERIMENTS:
        raise BadInput("RUN", folder, f"a run of kd.py, gpt.py or quantize.py; this one is of {script}.py")
    with reading(folder, "RUN"):
        named = {"name": ACCURACY.name} if experiment == "quantize" else facts["metric"]
        metric = str(named["name"])
    if metric not in METRICS and "path" not in named:
        raise BadInput("RUN", folder, f"a run measured by {' or '.join(METRICS)}; this one has {metric}")
    with reading(folder, "RUN"):
        results, entries = EXPERIMENTS[experiment].read(facts)
        if not entries:
            raise ValueError("it has no rows")
    kind = EXPERIMENTS[experiment]
    if experiment == "variants":
        kind = replace(kind, baseline=next(iter(entries.values())).baseline)
    run = Run(name, path, results, entries, metric_of(named), kind)
    if like and run.kind != like.kind:
        expected = f"{like.kind}, to compare with {like.name}"
        raise BadInput("RUN", folder, f"{expected}; this one is of {script}.py, measured by {run.metric.word}")
    return run
