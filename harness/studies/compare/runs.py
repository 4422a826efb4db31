"""Finished runs, and what of them is compared: rows by name, each with a value for every seed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datamodules
from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from harness.cli.sources import flat
from harness.reports.endings import planned_epochs
from harness.reports.results import BASELINE, Results, StudentResults, load_results
from harness.reports.settings import OF_TABLE
from harness.runs.records import reading
from lit_modules.tasks import BITS, Metric, known_metrics


@dataclass(frozen=True)
class Experiment:
    """How the runs of an experiment are compared."""

    baseline: str  # the row of the first run that differences are to
    methods: frozenset[str]  # settings that are compared; where these alone differ there is a verdict
    idle: frozenset[str]  # settings that move no figure of a row


OF_WRITING = frozenset({"sample", "run", "samples", "temperature", "top_k", "sample_seed", "decode_at"})
EXPERIMENTS = {
    "kd": Experiment(BASELINE, frozenset({"variants"}), OF_TABLE | {"teacher_cache_mb", "teacher_cache_dir"}),
    "variants": Experiment(BASELINE, frozenset({"variants", "equal"}), OF_TABLE | OF_WRITING),
    "gpt": Experiment("gpt", frozenset({"net", "model"}), OF_WRITING),
}


@dataclass
class FinishedRun:
    """A finished run."""

    name: str  # the end of its path that tells it from the other runs
    folder: Path
    results: Results
    experiment: Experiment

    def __post_init__(self) -> None:
        self.entries: Mapping[str, StudentResults] = self.results.students  # its rows by name
        self.metric: Metric = self.results.metric
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
        texts = "a run of gpt.py, or of kd.py on texts"
        return texts if self.metric is BITS else f"a run of kd.py measured by {self.metric.word}"

    def is_free(self, flag: str) -> bool:
        """Return whether no result depends on a setting, or on what it is an option of."""
        return any(flag == name or flag.startswith(f"{name}.") for name in self.results.free)

    @property
    def data(self) -> type[InMemoryData]:
        """The class of its data; the base class where it is not one of ours."""
        return getattr(datamodules, str(self.results.data["name"]), InMemoryData)

    def setting(self, flag: str) -> Any:
        """Return a setting as results.json has it; None where it is unset or unknown."""
        value: Any = self.config
        for part in flag.split("."):
            if isinstance(value, list):
                value = value[int(part)] if part.isdecimal() and int(part) < len(value) else None
            else:
                value = (value.get("init_args", value) or {}).get(part) if isinstance(value, dict) else None
        return value


def _with_teachers_epochs(results: Results) -> dict[str, Any]:
    """Return the configuration; in a run that has grown by epochs, the teacher's epochs become its option."""
    config, teacher = results.config, results.config.get("teacher")
    epochs = results.teacher.max_epochs if results.teacher else None
    if not isinstance(teacher, dict) or epochs in (None, planned_epochs(results)):
        return config
    return config | {"teacher": teacher | {"init_args": (teacher.get("init_args") or {}) | {"max_epochs": epochs}}}


def load_run(folder: str | Path, path: Path, name: str, like: FinishedRun | None = None) -> FinishedRun:
    """Load the run in a folder; BadInput if there is none that can be compared with the run `like`, if given."""
    facts = load_results(folder, "RUN")
    script = " ".join(facts["experiment"].split())[:40]
    if not facts.get("students"):
        raise BadInput("RUN", folder, f"a run of kd.py or gpt.py; this one is of {script}.py")
    with reading(folder, "RUN"):
        metric, has_path = str(facts["metric"]["name"]), "path" in facts["metric"]
    if metric not in known_metrics() and not has_path:
        raise BadInput("RUN", folder, f"a run measured by {' or '.join(known_metrics())}; this one has {metric}")
    with reading(folder, "RUN"):
        results = Results.read(facts)
    kind = EXPERIMENTS["kd" if results.teacher else "variants" if results.config.get("variants") else "gpt"]
    if kind is EXPERIMENTS["variants"]:
        kind = replace(kind, baseline=results.baselines[0])
    elif kind is EXPERIMENTS["kd"]:
        kind = replace(kind, baseline=results.metric.baseline)
    run = FinishedRun(name, path, results, kind)
    if like and run.kind != like.kind:
        expected = f"{like.kind}, to compare with {like.name}"
        raise BadInput("RUN", folder, f"{expected}; this one is of {script}.py, measured by {run.metric.word}")
    return run
