"""Makes choices of merged settings: for each class that is chosen its options, read and checked by jsonargparse."""

import re
from collections.abc import Callable, Collection, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from apprentice.errors import BadInput
from harness.cli.classes import Choice, Chosen, Classes
from harness.cli.declarations import Names
from harness.cli.messages import near, words
from harness.cli.resuming import NOTHING
from harness.cli.signatures import Missing, Signature, accepts_null, kinds_of, options_of
from harness.cli.sources import FlagValue, Layer, below, layer, read_value


class Resolver:
    """Makes choices of the merged layers; an option whose type is a base of some `classes` is itself a choice."""

    def __init__(self, settings: Layer, classes: Mapping[str, Classes]) -> None:
        self.settings, self.classes = dict(settings), dict(classes)
        self.flags: dict[str, tuple[Any, str]] = {}  # values and descriptions
        self._unknown: list[BadInput] = []
        self._missing: list[BadInput] = []

    def one(self, classes: Classes, key: str, optional: bool = False) -> Chosen:
        """Return the one class that is chosen at a key, or None if that is `optional`."""
        chosen = self.choose(classes, key)
        if isinstance(chosen, list) or (chosen is None and not optional):
            value = "null" if chosen is None else self.settings[key].value
            raise BadInput(key, value, f"one class: {classes.expected()}")
        return chosen

    def copy_options(self, start: str, key: str) -> None:
        """Begin a choice that has options but no class with the class and options of another one."""
        options = below(key, self.settings)
        if options and self.settings.get(key, FlagValue(None)).value is None:
            copied = {f"{key}.{name}": setting for name, setting in below(start, self.settings).items()}
            given = {f"{key}.{name}": setting for name, setting in options.items()}
            self.settings |= {key: self.settings.get(start, FlagValue(None)), **copied, **given}

    def named(self, classes: Classes, key: str, allowed: Names) -> dict[str, Chosen]:
        """Return the choices below a key by their names; `null` at a name is none."""
        if key in self.settings:
            expected = f"a name and a class, as --{key}.mine {next(iter(classes.by_name))}"
            raise BadInput(key, self.settings[key].value, expected)
        named = below(key, self.settings)
        settings = {flag: new for flag, new in named.items() if "." in flag or read_value(new.value, flag) is not None}
        if named and not settings:
            raise BadInput(f"{key}.{next(iter(named))}", "null", f"a class, here or at another name of --{key}")
        self.flags |= {f"{key}.{name}": (None, "") for name in named if "." not in name and name not in settings}
        names = dict.fromkeys(flag.split(".")[0] for flag in settings)
        for flag, setting in settings.items():
            name = flag.split(".")[0]
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or allowed.is_reserved(name):
                expected = f"a name of letters, digits, _ and - after --{key}, other than {allowed.reserved}"
                raise BadInput(f"{key}.{flag}", setting.value, expected)
            if name not in settings:
                chosen = [other for other in names if other in settings]
                others = f"one of {', '.join(chosen)}, or " if chosen else ""
                expected = f"{others}--{key}.{name} CLASS beside it for a new one{near(name, chosen)}"
                raise BadInput(f"{key}.{flag}", setting.value, expected)
        return {name: self.one(classes, f"{key}.{name}") for name in names}

    def choose(self, classes: Classes, key: str) -> Chosen:
        """Return what is chosen at this key, with its options."""
        setting = self.settings.get(key, FlagValue(None))
        name = read_value(setting.value, key)
        if isinstance(name, dict):
            del self.settings[key]
            self.settings = {**layer(name, setting.source, key), **self.settings}
            return self.choose(classes, key)
        self.flags[key] = name, ""
        if isinstance(name, list):
            positions = [str(i) for i in range(len(name))]
            self._find_unknown(key, positions, lambda _: f"a position from 0 to {len(name) - 1} after {key}")
            for i, entry in enumerate(name):
                if entry is None or isinstance(entry, list) or str(entry).lower() in {"true", "false"}:
                    raise BadInput(f"{key}.{i}", "null" if entry is None else entry, classes.expected())
                self.settings = {**layer(entry, setting.source, f"{key}.{i}"), **self.settings}
            return [self.choose(classes, f"{key}.{i}") for i in range(len(name))]
        chosen, sets = classes.find(name, key)
        if not callable(chosen):
            end = "" if chosen is None else f"; {chosen} is a name without options"
            self._find_unknown(key, (), lambda _: f"--{key} with the name of a class beside it{end}")
            return chosen
        signature = options_of(chosen, classes.arguments_to_skip(chosen))
        return Choice(classes.path(chosen, name), self.options(signature, key, sets, classes))

    def options(
        self, signature: Signature, key: str, sets: Mapping[str, Any], others: Classes | None = None
    ) -> dict[str, Any]:
        """Return the options of a class: as set, else what its name `sets`, else the constructor's defaults.

        `others` are the classes from which it was chosen: an unknown option may be one of theirs.
        """

        def alternatives(name: str) -> str:
            return signature.alternatives(name) + (others.having(name, key) if others else "")

        self._find_unknown(key, signature.hints, alternatives)
        values = {}
        for name, default in {**signature.defaults, **sets}.items():
            flag, hint = f"{key}.{name}", signature.hints[name]
            value, kinds = self._value(flag), {*kinds_of(hint)}
            classes = next((classes for classes in self.classes.values() if kinds.intersection(classes.bases)), None)
            if value is not Missing and classes is not None:
                self.settings.setdefault(flag, FlagValue(None if default is Missing else default))
                values[name] = _fit_to_hint(self.choose(classes, flag), hint, classes, value, flag)
                continue
            values[name] = default if value is Missing else signature.check(name, value, key)
            self.flags[flag] = values[name], signature.help[name]
            self.flags |= {f"{flag}.{inner}": (None, "") for inner in below(flag, self.settings)}
            if values[name] is Missing:
                expected = f"{words(hint)}; {signature.target.__name__} can't do without"
                self._missing.append(BadInput(flag, NOTHING, expected))
        return values

    def _find_unknown(self, key: str, names: Collection[str], expected: Callable[[str], str]) -> None:
        """Note the settings below a key of other names, with what is expected in place of such a name."""
        for flag, setting in below(key, self.settings).items():
            name = flag.partition(".")[0]
            if name not in names:
                self._unknown.append(BadInput(f"{key}.{flag}", setting.value, expected(name)))

    def _value(self, flag: str) -> Any:
        """Return the value of a flag or, if there are settings below it, their mapping."""
        value = self.settings.get(flag, FlagValue(Missing)).value
        mapping: dict[str, Any] = {}
        for name, setting in below(flag, self.settings).items():
            node, (*parents, last) = mapping, name.split(".")
            for parent in parents:
                node = node.setdefault(parent, {})
                if not isinstance(node, dict):
                    raise BadInput(f"{flag}.{name}", setting.value, f"{parent} either with a value or with options")
            node[last] = setting.value
        if not mapping:
            return value
        return mapping if value is Missing else {"class_path": value, "init_args": mapping}

    def raise_faults(self) -> None:
        """Raise BadInput for the first option that is unknown or missing."""
        for error in [*self._unknown, *self._missing]:
            raise error


def choose(value: Any, key: str, classes: Classes) -> Choice:
    """Return the class, with its options, that class_path and init_args in a value choose; `key` is its flag.

    Raises:
        BadInput: there is no such class or option, or an option has another value.
    """
    resolver = Resolver(layer(value, "", key), {})
    chosen = resolver.one(classes, key)
    resolver.raise_faults()
    assert isinstance(chosen, Choice)
    return chosen


def _fit_to_hint(chosen: Chosen, hint: Any, classes: Classes, value: Any, key: str) -> Chosen:
    kinds = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
    if isinstance(chosen, Choice) and not any(kind in classes.bases for kind in kinds):
        return [chosen]
    if (chosen is None and not accepts_null(hint)) or (isinstance(chosen, list) and not any(map(get_origin, kinds))):
        raise BadInput(key, value, classes.expected())
    return chosen
