"""results.json of a comparison of students: made from the records of each seed, and read back."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from apprentice.errors import BadInput
from harness.cli.messages import argv_of
from harness.reports.measures import FIGURES
from harness.reports.search import Search
from harness.reports.uncertainty import Interval, paired_differences
from harness.runs.records import Failure, Header, check_figures, check_format, reading
from lit_modules.tasks import Metric, known_metrics, metric_of
from lit_modules.tasks.base import EMA

BASELINE = "ce"
SAMPLED = ("test_labels", "test_places", "test_weights")  # values of samples that are the same for each net

Scores = Sequence[float | None]  # one a seed; None where the net failed
Epochs = list[dict[str, float | None]]  # what a net logged of each epoch
Packed = str | list[float]  # values of single test samples


@dataclass(kw_only=True)
class NetResults:
    """A net over all seeds."""

    figures: Mapping[str, float | None]  # by key, one for all seeds
    scores: Mapping[str, Scores]  # by key, one a seed
    # By key, for each seed the values of single test samples.
    samples: Mapping[str, Sequence[Packed | None]] = field(default_factory=dict)
    trained_epochs: Sequence[float | None] = ()  # for each seed, after which training ended
    epochs: Sequence[Epochs | None] = ()  # for each seed, what was logged of each epoch
    best_epochs: Sequence[float | None] = ()  # for each seed, the epoch whose weights were scored; empty: the last

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; TypeError if a figure is no number."""
        named = {name: value for name, value in facts.items() if name in cls.__dataclass_fields__}
        lists = {name: value for name, value in facts.items() if isinstance(value, list) and name not in named}
        samples = {name: of for name, of in lists.items() if any(isinstance(value, str | list) for value in of)}
        scores = {name: of for name, of in lists.items() if name not in samples}
        figures = {name: value for name, value in facts.items() if name not in {*named, *lists, *SAMPLED}}
        check_figures(*figures.values(), *(value for of in scores.values() for value in of))
        return cls(**{**named, "figures": figures, "scores": scores, "samples": samples})

    def to_json(self) -> dict[str, Any]:
        """Write figures, scores and samples side by side with what else there is."""
        return {
            **self.figures, **self.scores, **self.samples,
            "trained_epochs": self.trained_epochs, "epochs": self.epochs,
            **({"best_epochs": self.best_epochs} if self.best_epochs else {}),
        }  # fmt: skip

    def with_means(self) -> dict[str, float | None]:
        """Return its figures, with the means of those that it has of each seed."""
        means = {
            figure.key: figure.combine_known(self.scores.get(figure.key, ())) for figure in FIGURES if figure.per_seed
        }
        return {**self.figures, **means}


@dataclass(kw_only=True)
class TeacherResults(NetResults):
    """The teachers of all seeds, or the one `net` that taught with every seed."""

    nets: int  # how many they are
    max_epochs: int | None = None  # that they were to train for
    fit_seconds: Sequence[float | None] = ()  # of each seed; None where it was loaded
    # By key, values of the test samples that are the same for each net.
    sampled: Mapping[str, Packed] = field(default_factory=dict)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        return super().read({**facts, "sampled": {name: facts[name] for name in SAMPLED if name in facts}})

    def to_json(self) -> dict[str, Any]:
        numbers = {"nets": self.nets, "max_epochs": self.max_epochs, "fit_seconds": self.fit_seconds}
        return {**numbers, **super().to_json(), **self.sampled}


@dataclass(kw_only=True)
class StudentResults(NetResults):
    """A student."""

    objective: str  # the name of what it learns by
    failed: Sequence[Failure | None] = ()  # for each seed, where its loss stopped being finite, if it did
    net: str | None = None  # the class of its net, if its objective replaced the one that was chosen
    taught_by: str | None = None  # its teachers, if it has others than `teacher`
    variant: str | None = None  # its method, where its name begins with that of a net
    baseline: str = BASELINE  # the student that its difference is to
    delta_vs_ce: Interval | None = None  # the difference with its interval, of this comparison alone
    delta_vs_ce_corrected: Interval | None = None  # the same, corrected for all comparisons to its baseline (Holm)

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        failed = [None if failure is None else Failure(**failure) for failure in facts["failed"]]
        return super().read({**facts, "failed": failed})

    def to_json(self) -> dict[str, Any]:
        named = {"variant": self.variant} if self.variant else {}
        named |= {"baseline": self.baseline} if self.variant or self.baseline != BASELINE else {}
        return {
            "objective": self.objective, **({"net": self.net} if self.net else {}),
            **({"taught_by": self.taught_by} if self.taught_by else {}), **super().to_json(),
            "failed": [failure and asdict(failure) for failure in self.failed], "delta_vs_ce": self.delta_vs_ce,
            "delta_vs_ce_corrected": self.delta_vs_ce_corrected, **named,
        }  # fmt: skip


@dataclass(kw_only=True)
class Results(Header):
    """What results.json says of a comparison of students."""

    metric: Metric  # what nets are judged by
    teacher: TeacherResults | None  # the teachers of all seeds; None where students learn from labels alone
    students: dict[str, StudentResults]  # by name, in the order of the table
    students_fit_seconds: Sequence[float] = ()  # for each seed, of all students together
    classes: Sequence[str] = ()  # their names, if they have any
    search: Search | None = None  # of settings, if there was one
    pooled: Sequence[str] = ()  # the runs whose seeds these are, if it is several
    more_teachers: Mapping[str, TeacherResults] = field(default_factory=dict)  # others, by the names of their rows
    alone: Mapping[str, Packed] = field(
        default_factory=dict
    )  # without a tested teacher, what it would have as `sampled`

    @property
    def nets(self) -> dict[str, NetResults]:
        return {**self.teachers, **self.students}

    @property
    def teachers(self) -> dict[str, TeacherResults]:
        return {**({"teacher": self.teacher} if self.teacher else {}), **self.more_teachers}

    @property
    def sampled(self) -> Mapping[str, Packed]:
        """By key, values of the test samples that are the same for each net."""
        return self.alone or (self.teacher.sampled if self.teacher else {})

    @property
    def baselines(self) -> list[str]:
        """The students that others are compared with, if they are there or not."""
        return list(dict.fromkeys(student.baseline for student in self.students.values()))

    def seconds_of_seed(self) -> dict[int, float]:
        """Return how long the students of each seed took."""
        return dict(zip(self.seeds, self.students_fit_seconds, strict=True))

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        named = {name: value for name, value in facts.items() if name in cls.__dataclass_fields__}
        named |= cls.header_of(facts) | {name: facts[name] for name in ("students_fit_seconds", "classes")}
        students = {name: StudentResults.read(student) for name, student in facts["students"].items()}
        parts: dict[str, Any] = {
            "metric": metric_of(facts["metric"]),
            "teacher": TeacherResults.read(facts["teacher"]) if "teacher" in facts else None,
        }
        more = {name: TeacherResults.read(teacher) for name, teacher in facts.get("more_teachers", {}).items()}
        return cls(**{**named, **parts, "students": students, "more_teachers": more, "search": Search.read(facts)})

    def to_json(self) -> dict[str, Any]:
        more = {name: teacher.to_json() for name, teacher in self.more_teachers.items()}
        return {
            **super().to_json(),
            "metric": {
                "name": self.metric.name, "higher_is_better": self.metric.higher_is_better,
                **({} if self.metric.name in known_metrics() else {"path": self.config["metric"]["class_path"]}),
            },
            "students_fit_seconds": self.students_fit_seconds, "classes": self.classes,
            **({"teacher": self.teacher.to_json()} if self.teacher else {}),
            **({"alone": self.alone} if self.alone else {}),
            "students": {name: student.to_json() for name, student in self.students.items()},
            **({"more_teachers": more} if more else {}),
            **(self.search.to_json() if self.search else {}),
            **({"pooled": self.pooled} if self.pooled else {}),
        }  # fmt: skip


def name_baseline(results: Results) -> str:
    """Name what differences are to: where rows of several nets have one of their own, its variant."""
    if len(results.baselines) == 1:
        return results.baselines[0]
    variants = {results.students[name].variant for name in results.baselines if name in results.students}
    return (variants.pop() if len(variants) == 1 else None) or BASELINE


def differences_to(baseline: str, students: Mapping[str, StudentResults], metric: Metric) -> dict[str, list[float]]:
    """Return the paired differences to a baseline of the students that have it, itself too; none without it."""
    scores = {name: student.scores[metric.name] for name, student in students.items() if student.baseline == baseline}
    others = students[baseline].scores[metric.name] if baseline in students else ()
    return {name: paired_differences(values, others or [None] * len(values)) for name, values in scores.items()}


def averaged_key(metric: Metric) -> str:
    """Return the key of a metric of the moving averages of weights."""
    return f"test_{EMA}{metric.score}"


def load_results(folder: str | Path, flag: str = "run") -> dict[str, Any]:
    """Read the results.json of a finished run; BadInput if the folder, which `flag` named, has none of ours."""
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise BadInput(flag, folder, f"the folder of a finished run{_why_missing(Path(folder))}")
    with reading(folder, flag):
        facts: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if not isinstance(facts["experiment"], str):
            raise TypeError("it does not name its experiment")
        check_format(facts, folder, flag)
    return facts


def _why_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "; this is a file" if folder.exists() else "; there is no such folder"
    if (folder / "config.yaml").exists():
        command = " ".join(argv_of({"out": folder, "resume": "true"}))
        return f"; this run is unfinished, go on with it by `{command}`"
    inner = sorted(path.parent for path in folder.glob("*/results.json"))
    hint = f"; did you mean {', '.join(map(str, inner[:3]))}{', …' if len(inner) > 3 else ''}?" if inner else ""
    return f"; there is no results.json in it{hint}"


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """Return the mean; None where a value is missing, or there is none."""
    numbers = [value for value in values if value is not None]
    return statistics.mean(numbers) if numbers and len(numbers) == len(values) else None
