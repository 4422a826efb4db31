"""Classes chosen by name, with their options: what `--data MNIST --data.train_size 2000` stands for."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin

import yaml
from jsonargparse import get_loader

from apprentice.errors import BadInput
from harness.config.imports import imported
from harness.config.signatures import Options, accepts_null, near, options_of, words

NOTHING = object()
MANY = 8  # names in a message


@dataclass(frozen=True)
class Choice:
    """A class and all of its options; `build` makes an instance.

    Attributes:
        class_path: where the class is imported from.
        init_args: its options by name; among them may be choices, and lists of choices.
    """

    class_path: str
    init_args: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The class's short name."""
        return self.class_path.rpartition(".")[2]


Chosen: TypeAlias = Choice | list["Chosen"] | str | None  # text is a name that is looked up elsewhere


@dataclass(frozen=True)
class Family:
    """Classes of one kind: those of a package by their short names, and any other by its import path.

    Attributes:
        bases: what they derive from; those that are known by short names from the first.
        package: where short names are looked up.
        skip: arguments of their constructors that are no options.
        refused: classes that can't be used, with what would do.
        given: more arguments that are no options, as what is chosen elsewhere gives them.
    """

    bases: tuple[type, ...]
    package: ModuleType
    skip: frozenset[str] = frozenset()
    refused: Mapping[Any, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)

    @property
    def known(self) -> dict[str, type]:
        """The package's classes by short name."""
        return {
            name: value
            for name, value in vars(self.package).items()
            if inspect.isclass(value) and issubclass(value, self.bases[0]) and not inspect.isabstract(value)
            and value not in self.bases and not name.startswith("_") and not issubclass(value, tuple(self.refused))
        }  # fmt: skip

    def choose(self, name: Any, old: Chosen, key: str) -> Chosen:
        """The class of this name with its defaults, or the old choice where it is the same class.

        Raises:
            BadInput: there is no such class.
        """
        found = self.find(name, key)
        choice = Choice(self.path(found, name), self.options_of(found).defaults)
        return old if isinstance(old, Choice) and old.class_path == choice.class_path else choice

    def find(self, name: Any, key: str) -> type:
        """The class of this short name or import path; `key` is where it was given.

        Raises:
            BadInput: there is none, it is of another kind or can't be used.
        """
        if isinstance(name, str) and "." in name:
            found: type | None = imported(name, key, self.bases)
        else:
            found = {**self.known, **{refused.__name__: refused for refused in self.refused}}.get(name)
        for refused, reason in self.refused.items():
            if found is not None and issubclass(found, refused):
                raise BadInput(key, name, reason)
        if found is None or found in self.bases:
            raise BadInput(key, name, self.expected(name))
        return found

    def expected(self, name: Any = "") -> str:
        """What there is, for a message; if that is much, what is near to `name`."""
        known, close = list(self.known), near(name, self.known)
        shown = ", ".join(known if len(known) <= MANY else [*known[:MANY], "..."])
        return f"{shown} or the import path of a class{close}"

    def path(self, found: type, name: str) -> str:
        """Where a class that was found by `name` is imported from: from the package, if it is there."""
        if getattr(self.package, found.__name__, None) is found:
            return f"{self.package.__name__}.{found.__name__}"
        return name

    def options(self, choice: Choice, key: str) -> Options:
        """What the chosen class takes."""
        return self.options_of(imported(choice.class_path, key, self.bases))

    def options_of(self, found: type) -> Options:
        """What a class takes."""
        return options_of(found, self.skip.union(self.given))

    def label(self, chosen: Chosen) -> str:
        """What a choice is called."""
        return chosen.name if isinstance(chosen, Choice) else str(chosen or "null")


class Catalogue:
    """All families of a command line: options whose type is a family's base are themselves choices, at any depth."""

    def __init__(self) -> None:
        self.families: list[Family] = []

    def choose(self, family: Family, old: Chosen, given: Any, key: str) -> Chosen:
        """The old choice changed by `given`: another class drops the old one's options, an option changes only itself.

        Args:
            family: what is chosen from.
            old: the choice so far.
            given: a name, an import path, a mapping of options (with `class_path` and `init_args`, or without), a
                list of such, or YAML for one of these.
            key: where it stands on the command line.

        Raises:
            BadInput: naming the flag, `key` or below.
        """
        own, inner = split(given, key)
        if own is NOTHING:
            chosen = old
        elif own is None:
            chosen = None
        elif isinstance(own, list):
            chosen = [self.choose(family, None, entry, f"{key}.{i}") for i, entry in enumerate(own)]
        else:
            chosen = family.choose(own, old, key)
        return self._with_options(family, chosen, inner, key) if inner else chosen

    def _with_options(self, family: Family, chosen: Chosen, given: dict[str, Any], key: str) -> Chosen:
        if isinstance(chosen, list):
            entries = {str(i): entry for i, entry in enumerate(chosen)}
            for name, value in given.items():
                if name not in entries:
                    raise BadInput(
                        *leaf(f"{key}.{name}", value), f"a position from 0 to {len(entries) - 1} after {key}"
                    )
                entries[name] = self.choose(family, entries[name], value, f"{key}.{name}")
            return list(entries.values())
        if not isinstance(chosen, Choice):
            hint = f"; {chosen} is a name without options" if chosen else ""
            raise BadInput(*leaf(key, given), f"--{key} with the name of a class beside it{hint}")
        options = family.options(chosen, key)
        return self.set_options(chosen, options, given, key)

    def set_options(self, choice: Choice, options: Options, given: dict[str, Any], key: str) -> Choice:
        """The choice with these options changed."""
        values = dict(choice.init_args)
        for name, value in given.items():
            family = self.inner(options, name)
            if family is not None:
                values[name] = self._inner(family, options.hint(name), values.get(name), value, f"{key}.{name}")
            else:
                values[name] = options.check(name, spec(value, f"{key}.{name}") if name in options else value, key)
        return Choice(choice.class_path, values)

    def _inner(self, family: Family, hint: Any, old: Chosen, given: Any, key: str) -> Chosen:
        chosen = self.choose(family, old, given, key)
        kinds = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
        if isinstance(chosen, Choice) and not any(kind in family.bases for kind in kinds):
            return [chosen]
        takes = accepts_null(hint) if chosen is None else any(map(get_origin, kinds)) or not isinstance(chosen, list)
        if not takes:
            raise BadInput(key, given, family.expected())
        return chosen

    def check_complete(self, family: Family, chosen: Chosen, key: str) -> None:
        """Raise BadInput if an option that a class can't do without is missing, here or below."""
        if isinstance(chosen, list):
            for i, entry in enumerate(chosen):
                self.check_complete(family, entry, f"{key}.{i}")
        if isinstance(chosen, Choice):
            self.check_options(family.options(chosen, key), chosen, key)

    def check_options(self, options: Options, choice: Choice, key: str) -> None:
        """The same for the options of a chosen class."""
        for name in options:
            if name in options.required and name not in choice.init_args:
                expected = f"{words(options.hint(name))}; {choice.name} can't do without"
                raise BadInput(f"{key}.{name}", "(nothing)", expected)
            family = self.inner(options, name)
            if family is not None:
                self.check_complete(family, choice.init_args.get(name), f"{key}.{name}")

    def plain(self, family: Family, chosen: Chosen) -> Any:
        """A choice as YAML has it."""
        if isinstance(chosen, list):
            return [self.plain(family, entry) for entry in chosen]
        if not isinstance(chosen, Choice):
            return chosen
        options = family.options(chosen, "")
        return {"class_path": chosen.class_path, "init_args": self.plain_options(options, chosen)}

    def plain_options(self, options: Options, choice: Choice) -> dict[str, Any]:
        """A choice's options as YAML has them."""
        plain = {}
        for name, value in choice.init_args.items():
            family = self.inner(options, name)
            plain[name] = options.plain(name, value) if family is None else self.plain(family, value)
        return plain

    def inner(self, options: Options, name: str) -> Family | None:
        """The family that an option of a class chooses from, if there is one."""
        classes = set(leaves(options.hint(name))) if name in options else set()
        return next((family for family in self.families if classes.intersection(family.bases)), None)


def leaves(hint: Any) -> Iterator[Any]:
    """The types that a type is made of; what is wanted as a class or function is not looked into."""
    if get_origin(hint) not in {type, Callable}:
        yield hint
        for argument in get_args(hint):
            yield from leaves(argument)


def split(given: Any, key: str) -> tuple[Any, dict[str, Any]]:
    """What is chosen (or NOTHING, if only options are given), and the options."""
    if isinstance(given, str) and (given.strip().startswith(("[", "{")) or given.strip() == "null"):
        given = from_yaml(given, key)
    if not isinstance(given, dict):
        return given, {}
    inner = {str(name): value for name, value in given.items()}
    own, more = split(inner.pop("class_path"), key) if "class_path" in inner else (NOTHING, {})
    arguments = inner.pop("init_args", None) or {}
    if not isinstance(arguments, dict):
        raise BadInput(f"{key}.init_args", arguments, "a mapping of options")
    return own, {**more, **arguments, **inner}


def spec(value: Any, key: str) -> Any:
    """A class outside all families, chosen by flags, as jsonargparse has it."""
    if not isinstance(value, dict) or "class_path" not in value:
        return value
    own, inner = split(value, key)
    return {"class_path": own, "init_args": inner}


def from_yaml(text: str, key: str) -> Any:
    """The value of a flag that is written as a list or mapping."""
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError as error:
        raise BadInput(key, text, "YAML, as [First, Second] or {class_path: First}") from error


def leaf(key: str, value: Any) -> tuple[str, Any]:
    """The first flag below a key, and its value: what to name in a message."""
    while isinstance(value, dict) and value:
        name, value = next(iter(value.items()))
        key = key if name in {"class_path", "init_args"} else f"{key}.{name}"
    return key, value
