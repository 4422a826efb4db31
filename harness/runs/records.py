"""The records of a run as JSON in its folder: how it was made, what a fit leaves of itself and of each of its nets."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from apprentice.errors import BadInput
from harness.runs.files import read_text, write_json
from lit_modules.nets.identity import Origin
from lit_modules.tasks import known_metrics

FORMAT = 1  # of records and of results.json; a folder of another format is refused
LARGEST = 1e300  # of figures, so that sums of them are finite
SEVERAL = ("students", "rung")  # what names of fits of several nets begin with; others have the name of their net


@dataclass(kw_only=True)
class Header:
    """How results.json begins: what was run, on what."""

    experiment: str  # its name
    data: dict[str, Any]  # the name of the data set and its sizes
    hardware: dict[str, Any]  # facts of the machine
    versions: dict[str, Any]  # of packages
    config: dict[str, Any]  # the settings
    free: list[str]  # those on which no result depends
    seeds: list[int]  # of the run
    fingerprint: dict[str, Any]  # of the samples in each part of the data
    commits: list[str | None]  # of the code in each call; None where it is not known
    origins: dict[str, Origin] = field(default_factory=dict)  # of nets, by the flag that chose one

    def __post_init__(self) -> None:
        for name in ("data", "hardware", "versions", "config", "fingerprint"):
            if not isinstance(vars(self)[name], dict):
                raise TypeError(f"{name} is none")
        self.data["name"]  # or it is none of ours

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; TypeError or LookupError if it is something else."""
        return cls(**cls.header_of(facts))

    @staticmethod
    def header_of(facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that it needs, and those that are there; LookupError if one is missing."""
        named = {name: facts[name] for name in Header.__dataclass_fields__ if name != "origins"}
        return named | {"origins": {key: Origin(**origin) for key, origin in facts.get("origins", {}).items()}}

    def to_json(self) -> dict[str, Any]:
        named = {name: vars(self)[name] for name in Header.__dataclass_fields__ if name != "origins"}
        origins = {key: asdict(origin) for key, origin in self.origins.items()}
        return {"format": FORMAT, **named, **({"origins": origins} if origins else {})}


@dataclass(frozen=True)
class Failure:
    """Where a net's loss stopped being finite."""

    step: int
    term: str

    def __str__(self) -> str:
        return f"its {self.term} is not finite at step {self.step}"


@dataclass(frozen=True)
class NetRecord:
    """What a fit leaves of one net."""

    objective: str  # the name of what it learns by
    # Numbers by their keys in results.json, such as `parameters`, `test_acc`, `step_ms`; None where one was not
    # measured, or the net failed.
    figures: Mapping[str, float | None]
    failed: Failure | None = None  # where its loss stopped being finite, if it did
    trained_epochs: float | None = None  # after which training ended; None if it was only tested
    epochs: list[dict[str, float | None]] = field(default_factory=list)  # what it logged of each epoch
    net: str | None = None  # the class of its net, if its objective made that from the one that was chosen
    # Values of single test samples by their keys, as `harness.reports.samples` packs them.
    samples: Mapping[str, str | list[float]] = field(default_factory=dict)
    best_epoch: float | None = None  # that its weights and scores are of, if they were not to be the last

    def to_json(self) -> dict[str, Any]:
        """Write its figures, its samples and its other fields side by side."""
        named = {"objective": self.objective, **({"net": self.net} if self.net else {})}
        failed = None if self.failed is None else asdict(self.failed)
        ended = {"failed": failed, "trained_epochs": self.trained_epochs, "epochs": self.epochs}
        ended |= {} if self.best_epoch is None else {"best_epoch": self.best_epoch}
        return {**named, **self.figures, **ended, **self.samples}

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "NetRecord":
        """Read what `to_json` wrote; LookupError or TypeError if it is something else."""
        fields = {name: value for name, value in facts.items() if name in cls.__dataclass_fields__}
        others = {name: value for name, value in facts.items() if name not in fields}
        samples = {name: value for name, value in others.items() if isinstance(value, str | list)}
        figures = {name: value for name, value in others.items() if name not in samples}
        failed = None if facts["failed"] is None else Failure(**facts["failed"])
        record = cls(**{**fields, "figures": figures, "failed": failed, "samples": samples})
        tested = any({*metric.tested} <= figures.keys() for metric in known_metrics().values())
        measured = {"parameters", "step_ms", "train_flops"} <= figures.keys() and figures["parameters"] is not None
        if not (tested and measured and isinstance(record.objective, str) and isinstance(facts["epochs"], list)):
            raise TypeError("its nets are not recorded as ours")
        check_figures(*figures.values(), record.trained_epochs, record.best_epoch)
        return record


@dataclass(frozen=True)
class FitRecord:
    """What a fit leaves: its time, and a record of each net."""

    fit_seconds: float | None  # None if its nets were only tested
    max_epochs: int | None
    nets: dict[str, NetRecord] = field(default_factory=dict)
    teacher_samples: int | None = None  # that the teacher computed for a distillation; rows of packed texts
    teacher_stored: bool | None = None  # whether the teacher's outputs were stored

    def fault(self, name: str) -> str | None:
        """Say in which term and step the loss of a net stopped being finite, if it did."""
        failed = self.nets[name].failed if name in self.nets else None
        return None if failed is None else str(failed)

    def write(self, path: Path) -> None:
        nets = {name: net.to_json() for name, net in self.nets.items()}
        write_json(path, {"format": FORMAT, **vars(self), "nets": nets})

    @classmethod
    def read(cls, path: Path) -> "FitRecord":
        """Read `seed<k>/<fit>.json`, of one net with the fit's name or of several students.

        Raises:
            BadInput: it can't be read, or something else is in it.
        """
        with reading(path, "out", "a record of a finished fit, or no such file, and the fit is repeated"):
            facts = json.loads(read_text(path))
            check_format(facts, path)
            nets = {name: NetRecord.from_json(net) for name, net in facts["nets"].items()}
            if path.stem not in nets and not path.stem.startswith(SEVERAL):
                raise LookupError(f"{path.stem} is not in it")
            record = cls(**{**facts, "nets": nets})
            check_figures(record.fit_seconds, record.max_epochs, record.teacher_samples)
        return record


def check_format(facts: dict[str, Any], path: str | Path, flag: str = "out") -> None:
    """Take the number of its format from a file's content; BadInput if it is of another format."""
    number = facts.pop("format", None)
    if number != FORMAT:
        expected = f"format {FORMAT}, which this version writes; it has {number or 'no number'}; take another folder"
        raise BadInput(flag, path, expected)


def check_figures(*figures: Any) -> None:
    """Raise TypeError for what is neither None nor a finite number."""
    if not all(figure is None or (type(figure) in {int, float} and abs(figure) < LARGEST) for figure in figures):
        raise TypeError("a figure is no number")


@contextmanager
def reading(
    path: str | Path, flag: str, expected: str = "a readable results.json of our experiments in it"
) -> Iterator[None]:
    """Raise BadInput where the block does not find in a file, which `flag` named, what we write there."""
    try:
        yield
    except BadInput:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise BadInput(flag, path, f"{expected} ({cause})") from error
