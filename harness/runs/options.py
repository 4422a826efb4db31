"""The options that every experiment has, and those of one with one seed."""

from dataclasses import dataclass
from typing import ClassVar

from apprentice.errors import BadInput
from harness.cli import CALL, FREE, GROWS, SECONDS, Limit, Options, option
from strategies.exact.fixed_point import MOST_ADDENDS

MOST_SEEDS = 10_000  # by their number: each is a fit of minutes, and all are listed in the run's files
EXACT = Limit(
    lambda value: 1 <= value <= MOST_ADDENDS,
    f"the largest number of devices that the bits shall hold for, 1 to {MOST_ADDENDS}",
)


@dataclass
class RunOptions(Options):
    """Options that every experiment has; one with more derives its own from them."""

    seeds: int | list[int] = option(3, on_resume=GROWS)
    """N repeats everything with the seeds 0 to N - 1; a list, as [42], names them."""
    out: str | None = option(None, on_resume=CALL)
    """the run's folder; when not given, a new one under runs/."""
    resume: bool = option(False, on_resume=CALL)
    """go on where the run in that folder was cut off, or let it grow; its settings come from there."""
    overwrite: bool = option(False, on_resume=CALL)
    """replace the run in that folder; files that are not the run's stay."""
    checkpoint_every: float = option(30.0, Limit(lambda value: value > 0, SECONDS.expected), on_resume=FREE)
    """seconds of training that a crash may cost."""
    exact: int | None = option(None, EXACT)
    """N gives equal bits on up to N devices, which takes longer; null turns it off."""
    num_classes: int | None = None
    """of a LightningDataModule of your own, if it has no attribute num_classes."""
    why_inexact: ClassVar[str] = ""  # why there is no exact mode; empty where there is one

    @classmethod
    def idle_options(cls) -> set[str]:
        return {*super().idle_options(), *(["exact"] if cls.why_inexact else [])}

    def __post_init__(self) -> None:
        self.seeds = list_seeds("seeds", self.seeds)
        if self.out is not None and (not self.out.strip() or self.out.startswith("-")):
            dash = "; ./ before a name that begins with -" if self.out.strip() else ""
            raise BadInput("out", self.out, f"a folder{dash}")
        if self.resume and self.out is None:
            raise BadInput("resume", "true", "`out FOLDER` beside it, the run to go on with")
        if self.resume and self.overwrite:
            raise BadInput("overwrite", "true", "either this or `resume true`")
        super().__post_init__()


def list_seeds(name: str, seeds: int | list[int], first: int = 0) -> list[int]:
    """Return the seeds of an option, which is their number or a list of them; BadInput for none, or one twice."""
    if isinstance(seeds, int):
        if not 1 <= seeds <= MOST_SEEDS:
            expected = f"a number of seeds, at least 1 and at most {MOST_SEEDS}, or a list of them, as [42]"
            raise BadInput(name, seeds, expected)
        return list(range(first, first + seeds))
    if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
        raise BadInput(name, seeds, "seeds of 0 or more, none of them twice")
    return seeds


@dataclass
class OneSeedOptions(RunOptions):
    """Options of an experiment that has one seed, and perhaps no exact mode."""

    seeds: int | list[int] = 1
    """the one seed, as [42]."""
    why_one: ClassVar[str] = "it moves no figure"  # why one seed is enough

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seeds, list) and len(self.seeds) > 1:
            raise BadInput("seeds", self.seeds, f"one seed, as [42]: {self.why_one}")
        if self.why_inexact and self.exact is not None:
            raise BadInput("exact", self.exact, f"not allowed, as {self.why_inexact}")
