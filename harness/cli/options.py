"""The options that every experiment has, and those of one that has a single seed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from apprentice.errors import BadInput
from harness.cli.resuming import CALL, FREE, GROWS
from strategies.exact.fixed_point import MOST_ADDENDS

MOST_SEEDS = 10_000  # by their number: each is a fit of minutes, and all are listed in the run's files


@dataclass
class RunOptions:
    """Options that every experiment has; one with more derives its own from them.

    A field's metadata says how a resumed run may change the option; without it, the option has to stay.

    Args:
        seeds: N repeats everything with the seeds 0 to N - 1; a list, as [42], names them.
        out: the run's folder; when not given, a new one under runs/.
        resume: go on where the run in that folder was cut off, or let it grow; its settings come from there.
        overwrite: replace the run in that folder; files that are not the run's stay.
        checkpoint_every: seconds of training that a crash may cost.
        num_classes: of a LightningDataModule of your own, if it has no attribute num_classes.
        exact: N gives equal bits on any number of devices up to N, which takes longer.
    """

    seeds: int | list[int] = field(default=3, metadata=GROWS.metadata)
    out: str | None = field(default=None, metadata=CALL.metadata)
    resume: bool = field(default=False, metadata=CALL.metadata)
    overwrite: bool = field(default=False, metadata=CALL.metadata)
    checkpoint_every: float = field(default=30.0, metadata=FREE.metadata)
    exact: int | None = None
    num_classes: int | None = None
    common: ClassVar[Collection[str]] = ()  # the flags of --help; empty: the script's own and usual ones of the Trainer
    idle: ClassVar[Collection[str]] = ()  # options that do nothing in a script; --help leaves them out
    why_inexact: ClassVar[str] = ""  # why there is no exact mode; empty where there is one
    quick_values: ClassVar[Mapping[str, Any]] = {}  # what `--quick true` sets where it is not given

    def __post_init__(self) -> None:
        if isinstance(self.seeds, int):
            if not 1 <= self.seeds <= MOST_SEEDS:
                expected = f"a number of seeds, at least 1 and at most {MOST_SEEDS}, or a list of them, as [42]"
                raise BadInput("seeds", self.seeds, expected)
            self.seeds = list(range(self.seeds))
        seeds = self.seeds
        if not seeds or len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**63 for seed in seeds):
            raise BadInput("seeds", seeds, "seeds of 0 or more, none of them twice")
        if self.out is not None and (not self.out.strip() or self.out.startswith("-")):
            dash = "; ./ before a name that begins with -" if self.out.strip() else ""
            raise BadInput("out", self.out, f"a folder{dash}")
        if not self.checkpoint_every > 0:
            raise BadInput("checkpoint_every", self.checkpoint_every, "seconds, above 0")
        if self.exact is not None and not 1 <= self.exact <= MOST_ADDENDS:
            expected = f"the largest number of devices that the bits shall hold for, 1 to {MOST_ADDENDS}"
            raise BadInput("exact", self.exact, expected)
        if self.resume and self.out is None:
            raise BadInput("resume", "true", "--out FOLDER beside it, the run to go on with")
        if self.resume and self.overwrite:
            raise BadInput("overwrite", "true", "either this or --resume true")


@dataclass
class OneSeedOptions(RunOptions):
    """Options of an experiment that has one seed, and perhaps no exact mode.

    Args:
        seeds: the one seed, as [42].
    """

    seeds: int | list[int] = 1
    why_one: ClassVar[str] = "it moves no figure"  # why one seed is enough

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.seeds, list) and len(self.seeds) > 1:
            raise BadInput("seeds", self.seeds, f"one seed, as [42]: {self.why_one}")
        if self.why_inexact and self.exact is not None:
            raise BadInput("exact", self.exact, f"it left out: {self.why_inexact}")
