"""What results.json says of a search of settings."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class SettingScores:
    """One setting of a method: its options, the validation of each seed, and the epochs that it was trained for."""

    options: Mapping[str, Any]
    validation: Sequence[float | None]
    epochs: int


@dataclass(frozen=True)
class TunedMethod:
    """The settings of a method, the given one first, and the number of the chosen one."""

    settings: Sequence[SettingScores]
    chosen: int


@dataclass(frozen=True)
class SearchCost:
    """What a search took: epochs of each method's students and of the teachers, samples that teachers computed, times.

    `teacher_samples_alone` is what they would have computed for each setting by itself. Of packed texts, both count
    rows; a set's sizes count texts.
    """

    student_epochs: Mapping[str, int]
    teacher_samples: int
    teacher_samples_alone: int
    fit_seconds: float
    teacher_epochs: int
    teacher_fit_seconds: float

    def __add__(self, other: "SearchCost") -> "SearchCost":
        mine, theirs = vars(self), vars(other)
        epochs = {name: count + other.student_epochs[name] for name, count in self.student_epochs.items()}
        sums = {name: mine[name] + theirs[name] for name in mine if name != "student_epochs"}
        return SearchCost(student_epochs=epochs, **sums)


@dataclass(frozen=True)
class Search:
    """A search: each method's settings, its cost, and the epochs after which settings were compared."""

    methods: Mapping[str, TunedMethod]
    cost: SearchCost
    rungs: Sequence[int]

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self | None:
        """Read what `to_json` wrote into results.json; None if it has no search."""
        if "tuning" not in facts:
            return None
        methods = {
            name: TunedMethod([SettingScores(**setting) for setting in tuned["settings"]], tuned["chosen"])
            for name, tuned in facts["tuning"].items()
        }
        return cls(methods, SearchCost(**facts["tuning_cost"]), facts["tuning_rungs"])

    def to_json(self) -> dict[str, Any]:
        methods = {name: asdict(tuned) for name, tuned in self.methods.items()}
        return {"tuning": methods, "tuning_cost": asdict(self.cost), "tuning_rungs": self.rungs}
