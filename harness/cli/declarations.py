"""What the command line of a script offers, key by key."""

from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from harness.cli.classes import Choice, Classes
from harness.cli.options import Options
from harness.cli.resuming import CALL, FIXED, FREE, OnResume, rules_of
from harness.cli.signatures import Signature, options_of
from harness.cli.sources import FlagValue, layer
from harness.start import called_as

Recipes: TypeAlias = Mapping[Any, Mapping[str, Any]]  # by values of an option the flags that these set
RecipesOf: TypeAlias = Callable[[Mapping[str, Any]], Recipes]  # by what the user has set
Fixed: TypeAlias = Callable[[Mapping[str, Any]], Iterable[str]]  # the choices of the keys so far -> names


class Names(NamedTuple):
    """Names of the user's own for the choices at a key."""

    is_reserved: Callable[[str], bool]  # no choice may have such a name
    reserved: str  # how a message lists these
    used: Callable[[Namespace, str], Collection[str]]  # of a configuration, those at a key that it uses


@dataclass(frozen=True)
class Entry:
    """What stands at a key: the options of one class, or a choice, or texts."""

    options: Signature | None = None  # of the one class
    named: bool = False  # there are many, by names of the user's own
    names: Names | None = None  # of choices
    fixed: Fixed | None = None  # names the arguments of constructors that earlier choices give
    replaced_by: str = ""  # the key of choices by names: where there are some, none is made here
    defaults_from: str = ""  # the key whose class and options this one has where options are set and no class
    about: str = ""  # what it is, for the help


class Group(NamedTuple):
    """Options that a script has where the choice at a key is of some kind."""

    key: str
    applies: Callable[[Choice], bool]
    path: str  # of a dataclass, imported when it is needed
    kind: str  # of the choice, such as "texts"

    @property
    def options(self) -> type[Options]:
        """The dataclass."""
        options: type[Options] = resolve_name(self.path)
        return options


class Declarations:
    """The keys and plain options of a script's command line; making `options`, a dataclass, checks their values."""

    def __init__(self, prog: str, description: str, options: type[Options]) -> None:
        self.prog, self.description = prog, description
        self.name = called_as(prog).removeprefix("python experiments/")
        self._own = options
        self.groups: list[Group] = []  # of options that the script has with some choices alone
        self.options = options_of(options)  # and those of groups, once choices are known
        self.brought_by: dict[str, str] = {}  # of options of groups, the keys
        self.entries: dict[str, Entry] = {}
        self.idle = options.idle_options()  # flags that do nothing in this script
        self._defaults: dict[str, FlagValue] = {}
        self._recipes: list[tuple[str, RecipesOf]] = []  # a plain option, and what its values set
        self._experiments: list[tuple[str, Any, Collection[str], Mapping[str, str]]] = []  # see `default_experiment`
        self.classes: dict[str, Classes] = {}  # what keys choose from, and options of the Trainer
        self._on_resume = rules_of(options)
        self.checks: list[Callable[[Namespace], object]] = []
        self.unchosen: dict[str, type] = {}  # by keys, classes whose options may be set where nothing is chosen
        if options.quick_values:
            self.add_recipes("quick", {True: options.quick_values})

    def add_choice(
        self,
        key: str,
        classes: Classes,
        default: Any = None,  # short name, or class_path and init_args; None makes `null` a choice
        *,
        fixed: Fixed | None = None,  # names more arguments of constructors that are not options
        replaced_by: str = "",  # the key of variants: where there are some, nothing is chosen here
        defaults_from: str = "",  # the key whose class and options this one has where options are set and no class
        about: str = "",  # what it is, for the help
        on_resume: OnResume = FIXED,
    ) -> None:
        """Add `--KEY CLASS` and `--KEY.OPTION VALUE`."""
        self.classes[key], self._on_resume[key] = classes, on_resume
        self._add(key, Entry(fixed=fixed, replaced_by=replaced_by, defaults_from=defaults_from, about=about), default)

    def extend_options(self, choices: Mapping[str, Any]) -> None:
        """Let plain options be the script's own and those of the groups that the choices by key bring."""
        chosen = {key: choice for key, choice in choices.items() if isinstance(choice, Choice)}
        groups = [group for group in self.groups if group.key in chosen and group.applies(chosen[group.key])]
        self.options = self._with(groups)
        brought = ((name, group.key) for group in groups for name in options_of(group.options).hints)
        self.brought_by = {name: key for name, key in brought if name not in self._with(()).hints}
        self._on_resume |= rules_of(self.options.target)

    def _with(self, groups: Iterable[Group]) -> Signature:
        """Return the script's own options and those of some groups."""
        return options_of(_join_options(self._own, *(group.options for group in groups)))

    def add_variants(
        self,
        key: str,
        classes: Classes,
        defaults: Mapping[str, Any],
        names: Names,
        fixed: Fixed | None = None,  # as above
        about: str = "",
    ) -> None:
        """Add `--KEY.NAME CLASS` and `--KEY.NAME.OPTION VALUE` for any name, merged into the defaults by name."""
        self.classes[key] = classes
        self._add(key, Entry(named=True, names=names, fixed=fixed, about=about), dict(defaults))

    def add_recipes(self, option: str, recipes: Recipes | RecipesOf) -> None:
        """Let a value of an option, or one in its list, set many flags, each of which may be given beside it.

        The value `...` stands for any but None. A function is called when the option has a value, with all by flag.
        """
        self._recipes.append((option, recipes if callable(recipes) else lambda _: recipes))

    def default_experiment(
        self, option: str, value: Any, unless: Collection[str], choices: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Give a plain option a value in new runs with these choices by key, for which no flag of `unless` is set."""
        self._experiments.append((option, value, unless, choices))

    def add_class(
        self,
        key: str,
        options: Signature,
        default: Mapping[str, Any] = MappingProxyType({}),
        on_resume: Mapping[str, OnResume] = MappingProxyType({}),
    ) -> None:
        """Add `--KEY.OPTION VALUE`, the options of one class; `default` are in place of the class's own."""
        self._on_resume |= {f"{key}.{name}": rule for name, rule in on_resume.items()}
        self._add(key, Entry(options=options), dict(default))

    def add_check(self, check: Callable[[Namespace], object]) -> None:
        """Let a function raise BadInput for a configuration whose choices can all be built."""
        self.checks.append(check)

    def add_texts(self, key: str, about: str) -> None:
        """Add `--KEY.NAME.OPTION VALUE` for any names; the configuration has the values by what follows the key."""
        self._add(key, Entry(named=True, about=about), {})

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


def _join(options: type[Options], *groups: type[Options]) -> type[Options]:
    """Return a dataclass with all of their fields and checks."""
    return dataclass(type(options.__name__, (*groups, options), {"__module__": __name__})) if groups else options


_join_options: Callable[..., type[Options]] = cache(_join)
