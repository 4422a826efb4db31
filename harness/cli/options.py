"""How an option of a script is declared, in one place, and checked beside the others."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from apprentice.errors import BadInput
from harness.cli.resuming import FIXED, OnResume

NO_FLAGS: Mapping[str, str] = MappingProxyType({})


class Limit(NamedTuple):
    """Which values an option takes, and how a message says it."""

    holds: Callable[[Any], bool]
    expected: str


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
class Options:
    """The plain options of a script, which derives its own from them."""

    common: ClassVar[Collection[str]] = ()  # the flags of --help; empty: the script's own and usual ones of the Trainer
    idle: ClassVar[Collection[str]] = ()  # options that do nothing in the script; --help leaves them out
    quick_values: ClassVar[Mapping[str, Any]] = {}  # what `--quick true` sets where it is not given

    @classmethod
    def idle_options(cls) -> set[str]:
        """Return the options that do nothing in the script."""
        return {*cls.idle}

    def __post_init__(self) -> None:
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
