"""What the command line of a script offers, key by key."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from harness.cli import training
from harness.cli.classes import Classes
from harness.cli.entries import Entry, Fixed
from harness.cli.options import RunOptions
from harness.cli.resuming import CALL, FIXED, FREE, OnResume, rules_of
from harness.cli.signatures import Signature, options_of
from harness.cli.sources import Layer, Setting, layer, recipe
from harness.start import called_as


class Declarations:
    """The keys and plain options of a script's command line; making `options`, a dataclass, checks their values."""

    def __init__(self, prog: str, description: str = "", options: type[RunOptions] = RunOptions) -> None:
        self.prog, self.description = prog, description
        self.name = called_as(prog).removeprefix("python experiments/")
        self.options = options_of(options)
        self.entries: dict[str, Entry] = {}
        self.idle = {*options.idle, *(["exact"] if options.why_inexact else [])}  # flags that do nothing in this script
        self._defaults: dict[str, Setting] = {}
        self._recipes: list[tuple[str, Any, Layer]] = []  # a plain option, its value, and the defaults that it adds
        self._experiments: list[tuple[str, Any, str, Mapping[str, str]]] = []  # see `default_experiment`
        self.classes: dict[str, Classes] = {}  # what keys choose from, and options of the Trainer
        self._on_resume = rules_of(options)
        self._apart: list[str] = []  # how the flags of optimizers begin
        if options.quick_values:
            self.add_recipes("quick", {True: options.quick_values})

    def add_choice(
        self,
        key: str,
        classes: Classes,
        default: Any = None,  # short name, or class_path and init_args; None makes `null` a choice
        *,
        fixed: Fixed | None = None,  # names more arguments of constructors that are not options
        unless: str = "",  # the key of variants: where there are some, nothing is chosen here
        about: str = "",  # what it is, for the help
        on_resume: OnResume = FIXED,
    ) -> None:
        """Add `--KEY CLASS` and `--KEY.OPTION VALUE`."""
        self.classes[key], self._on_resume[key] = classes, on_resume
        self._add(key, Entry(fixed=fixed, unless=unless, about=about), default)

    def add_variants(
        self,
        key: str,
        classes: Classes,
        defaults: Mapping[str, Any],
        fixed: Fixed | None = None,  # as above
        about: str = "",
    ) -> None:
        """Add `--KEY.NAME CLASS` and `--KEY.NAME.OPTION VALUE` for any name, merged into the defaults by name.

        The plain option `only`, if there is one, says which of them are wanted; see `rows`.
        """
        self.classes[key] = classes
        self._add(key, Entry(named=True, fixed=fixed, about=about), dict(defaults))

    def add_recipes(self, option: str, recipes: Mapping[Any, Mapping[str, Any]]) -> None:
        """Let a value of a plain option, or one in its list, set many flags, each of which may be given beside it.

        The value `...` stands for any but None.
        """
        for value, flags in recipes.items():
            self._recipes.append((option, value, recipe(flags, f"--{option} {'N' if value is ... else value}")))

    def default_experiment(
        self, option: str, value: Any, unless: str, choices: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Give a plain option a value in new runs with these choices by key, for which `unless`, a flag, is not set."""
        self._experiments.append((option, value, unless, choices))

    def add_optimizer(
        self, default: Any = "Adam", scheduler_on_resume: OnResume = FIXED, apart: Sequence[str] = ()
    ) -> None:
        """Add `--optimizer` and `--scheduler`: torch's classes, tried out on a dummy net when parsed.

        Nets that may be trained `apart`, such as a teacher, have `--NAME_optimizer` and `--NAME_scheduler` beside them.
        """
        self._on_resume["scheduler"] = scheduler_on_resume
        self._apart = ["", *(f"{name}_" for name in apart)]
        for before, (key, (classes, about)) in itertools.product(self._apart, training.RATES.items()):
            self.classes[before + key] = classes
            chosen = default if before + key == "optimizer" else None
            self._add(before + key, Entry(like=key if before else "", about=about), chosen)

    def add_class(self, key: str, target: type, skip: Iterable[str] = ()) -> None:
        """Add `--KEY.OPTION VALUE`, the options of one class but for those to skip."""
        self._add(key, Entry(options=options_of(target, frozenset(skip))), {})

    def add_texts(self, key: str, about: str) -> None:
        """Add `--KEY.NAME.OPTION VALUE` for any names; the configuration has the values by what follows the key."""
        self._add(key, Entry(named=True, about=about), {})

    def add_trainer(
        self,
        *,
        loggers: bool = True,
        on_resume: Mapping[str, OnResume] = MappingProxyType({}),
        idle: Iterable[str] = (),
        **defaults: Any,
    ) -> None:
        """Add `--trainer.OPTION` for Lightning's Trainer, with options below `--trainer.strategy` and `callbacks`.

        `defaults` are in place of the Trainer's own. `logger` names others beside ours, where there are `loggers`, or
        switches ours on and off. `on_resume` says of options that results depend on how they may change;
        `idle` are options that do nothing here.
        """
        self.idle |= {f"trainer.{name}" for name in idle}
        rules = {**dict.fromkeys(training.ANY_ON_RESUME, FREE), **on_resume}
        self._on_resume |= {f"trainer.{name}": rule for name, rule in rules.items()}
        self.classes["trainer.callbacks"] = training.CALLBACKS
        self.classes["trainer.strategy"] = training.Strategies()
        if loggers:
            self.classes["trainer.logger"] = training.LOGGERS
        self._add("trainer", Entry(options=_trainer_options(loggers)), {"logger": True, **defaults})

    def _add(self, key: str, entry: Entry, default: Any) -> None:
        self.entries[key] = entry
        self._defaults |= layer(default, key=key)

    def on_resume(self, flag: str) -> OnResume:
        """Return how a resumed run may change a setting, as it or the class that it belongs to declares."""
        while flag not in self._on_resume and "." in flag:
            flag = flag.rpartition(".")[0]
        return self._on_resume.get(flag, FIXED)

    @property
    def free(self) -> list[str]:
        """The flags on which no result depends, nor on the options below them."""
        return [flag for flag, rule in self._on_resume.items() if rule in {CALL, FREE}]


@cache
def _trainer_options(loggers: bool) -> Signature:
    from lightning.pytorch import Trainer

    return Signature(Trainer, training.OWNED, training.TYPES if loggers else {**training.TYPES, "logger": bool})
