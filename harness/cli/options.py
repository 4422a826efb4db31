"""How an option is declared, in one place; the options that every experiment has, and those of one with one seed."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from apprentice.errors import BadInput
from harness.cli.resuming import CALL, FIXED, FREE, GROWS, OnResume
from strategies.exact.fixed_point import MOST_ADDENDS

MOST_SEEDS = 10_000  # by their number: each is a fit of minutes, and all are listed in the run's files
NO_FLAGS: Mapping[str, str] = MappingProxyType({})


class Limit(NamedTuple):
    """Which values an option takes, and how a message says it."""

    holds: Callable[[Any], bool]
    expected: str


EXACT = Limit(
    lambda value: 1 <= value <= MOST_ADDENDS,
    f"the largest number of devices that the bits shall hold for, 1 to {MOST_ADDENDS}",
)
COUNT = Limit(lambda value: value >= 1, "a whole number, at least 1")
SECONDS = Limit(lambda value: 0 < value < math.inf, "seconds, above 0")


def at_least(least: int, what: str) -> Limit:
    """Allow so many `what` or more."""
    return Limit(lambda value: value >= least, f"a number of {what}, at least {least}")


def option(
    default: Any,
    limit: Limit | None = None,
    *,
    needs: Mapping[str, str] = NO_FLAGS,
    excludes: Mapping[str, str] = NO_FLAGS,
    on_resume: OnResume = FIXED,
    acts_with: str = "",
) -> Any:
    """Declare an option: a dataclass's field, with its help as the docstring below it.

    Args:
        default: None or False where it is off; then nothing is checked.
        limit: which values it takes; of lists, which entries.
        needs: other options that have to be on beside it, each with what stands for its value in the message.
        excludes: other options that have to be off beside it, each with the reason, a clause that begins with `which`.
        on_resume: what a resumed run may do with it.
        acts_with: an option that makes all others idle but those that say its name here.
    """
    metadata = {"limit": limit, "needs": needs, "excludes": excludes, "on_resume": on_resume, "acts_with": acts_with}
    default_or_factory: Any = {"default_factory": default} if callable(default) else {"default": default}
    return field(**default_or_factory, metadata=metadata)


@dataclass
class RunOptions:
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
    common: ClassVar[Collection[str]] = ()  # the flags of --help; empty: the script's own and usual ones of the Trainer
    idle: ClassVar[Collection[str]] = ()  # options that do nothing in a script; --help leaves them out
    why_inexact: ClassVar[str] = ""  # why there is no exact mode; empty where there is one
    quick_values: ClassVar[Mapping[str, Any]] = {}  # what `--quick true` sets where it is not given

    def __post_init__(self) -> None:
        self.seeds = list_seeds("seeds", self.seeds)
        if self.out is not None and (not self.out.strip() or self.out.startswith("-")):
            dash = "; ./ before a name that begins with -" if self.out.strip() else ""
            raise BadInput("out", self.out, f"a folder{dash}")
        if self.resume and self.out is None:
            raise BadInput("resume", "true", "--out FOLDER beside it, the run to go on with")
        if self.resume and self.overwrite:
            raise BadInput("overwrite", "true", "either this or --resume true")
        self._check_declared()

    def _check_declared(self) -> None:
        """Raise BadInput for the first option beyond its limit, then for the first that does not go with another."""
        on = {name: value for name, value in vars(self).items() if value is not None and value is not False}
        rules = {field.name: field.metadata for field in fields(self) if field.name in on}
        for name, rule in rules.items():
            entries = on[name] if isinstance(on[name], list) else [on[name]]
            if (limit := rule.get("limit")) and not (entries and all(map(limit.holds, entries))):
                raise BadInput(name, on[name], limit.expected)
        for name, rule in rules.items():
            missing = [f"--{other} {value}" for other, value in rule.get("needs", {}).items() if other not in on]
            if missing:
                raise BadInput(name, on[name], f"{' and '.join(missing)} beside it")
            for other, why in rule.get("excludes", {}).items():
                if other in on:
                    raise BadInput(name, on[name], f"not allowed with --{other}, {why}")


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
