"""Strategies as choices: a project's own by short names, anyone's by import path; Lightning's other names stay text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from lightning.pytorch import strategies
from lightning.pytorch.strategies import Strategy

from harness.config.choices import Choice, Chosen, Family
from harness.config.imports import imported
from harness.config.signatures import near, options_of

Names = Mapping[str, tuple[type[Strategy], Mapping[str, Any]]]  # classes by short name, with the options that it sets

# What the Trainer hands a strategy, hooks that are objects, and what has a flag of its own.
SKIP = frozenset({
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "ddp_comm_state",
    "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "exact",
})  # fmt: skip


@dataclass(frozen=True)
class Strategies(Family):
    """What `--trainer.strategy` chooses from.

    Attributes:
        names: the project's own by short name.
    """

    bases: tuple[type, ...] = (Strategy,)
    package: ModuleType = strategies
    skip: frozenset[str] = SKIP
    names: Names = field(default_factory=dict)

    @property
    def known(self) -> dict[str, type]:
        """The choice that is Lightning's, and the project's classes by short name."""
        return {"auto": Strategy, **{name: found for name, (found, _) in self.names.items()}}

    def choose(self, name: Any, old: Chosen, key: str) -> Chosen:
        """The class of this name with what the name sets; the name itself if it is one that Lightning looks up."""
        if name in self.names:
            found, sets = self.names[name]
            return old if self.label(old) == name else Choice(_path(found), {**self.options_of(found).defaults, **sets})
        return name if name in ("auto", *_looked_up()) else super().choose(name, old, key)

    def expected(self, name: Any = "") -> str:
        """All short names, and those near to `name`, Lightning's too."""
        return f"{', '.join(self.known)} or the import path of a class{near(name, [*self.known, *_looked_up()])}"

    def label(self, chosen: Chosen) -> str:
        """The short name that stands for most of the choice, or its import path."""
        if not isinstance(chosen, Choice):
            return super().label(chosen)
        own = {name: sets for name, (found, sets) in self.names.items() if _path(found) == chosen.class_path}
        fitting = [name for name, sets in own.items() if sets.items() <= chosen.init_args.items()]
        return max(fitting, key=lambda name: len(own[name]), default=chosen.class_path)

    def exact(self, chosen: Chosen) -> bool:
        """Whether a choice can hold `--exact`: its class takes it."""
        return isinstance(chosen, Choice) and "exact" in options_of(imported(chosen.class_path, "trainer.strategy"))


def _path(found: type) -> str:
    return f"{found.__module__}.{found.__name__}"


def _looked_up() -> list[str]:
    return strategies.StrategyRegistry.available_strategies()
