"""What a class takes: the typed keyword arguments of its constructor, as jsonargparse reads them."""

import difflib
import functools
import inspect
import types
import typing
from argparse import ArgumentError
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from apprentice.errors import BadInput

WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
WORDS[timedelta] = "a time, as 0:30:00"
ANYTHING = "a value"
TEXT = (str, str | None)


class Options:
    """The options of a class: names, types, defaults and descriptions.

    jsonargparse resolves the signature (through `**kwargs`, too), checks values against the types and serializes them.
    One option is checked at a time, so that an error belongs to one flag.

    Args:
        target: the class.
        skip: arguments that are no options.
        types: other types for some arguments than the constructor's own.
    """

    def __init__(self, target: type, skip: Iterable[str] = (), types: Mapping[str, Any] | None = None) -> None:
        self.target, types = target, types or {}
        self._parser = ArgumentParser(exit_on_error=False, add_help=False)
        for name, hint in types.items():
            self._parser.add_argument(
                f"--{name}", type=hint, default=inspect.signature(target).parameters[name].default
            )
        self._parser.add_class_arguments(target, skip={*skip, *types}, as_group=False, fail_untyped=False)
        names = set(self._parser.get_defaults().keys())
        self._actions = {action.dest: action for action in self._parser._actions if action.dest in names}
        for action in self._actions.values():
            if hasattr(action, "_typehint"):
                action._typehint = whole_first(action._typehint)
        self.required = {
            name for name, action in self._actions.items() if action.required or self._has_no_default(name)
        }
        for action in self._actions.values():
            action.required = False

    def _has_no_default(self, name: str) -> bool:
        parameter = inspect.signature(self.target).parameters.get(name)
        return parameter is not None and parameter.default is inspect.Parameter.empty

    def __iter__(self) -> typing.Iterator[str]:
        return iter(self._actions)

    def __contains__(self, name: object) -> bool:
        return name in self._actions

    @property
    def defaults(self) -> dict[str, Any]:
        """The options that have a default, with it."""
        return {name: action.default for name, action in self._actions.items() if name not in self.required}

    def hint(self, name: str) -> Any:
        """The type of an option."""
        return getattr(self._actions[name], "_typehint", self._actions[name].type)

    def description(self, name: str) -> str:
        """What the docstring says about an option, in one line."""
        return " ".join((self._actions[name].help or "").split())

    def check(self, name: str, value: Any, key: str = "") -> Any:
        """The value as the option's type has it; text, as on the command line, is read as YAML where that is wanted.

        Args:
            name: the option.
            value: what was given.
            key: where the class stands on the command line, for the message.

        Raises:
            BadInput: there is no such option, or its type is another.
        """
        flag = f"{key}.{name}" if key else name
        if name not in self:
            raise BadInput(flag, value, self._alternatives(name))
        if value is None:
            if accepts_null(self.hint(name)):
                return None
            raise BadInput(flag, "null", words(self.hint(name)))
        if isinstance(value, str) and value != "null" and self.hint(name) in TEXT:
            return value  # as it stands: to YAML it may be a comment, which is null
        for candidate in (value, [value]) if isinstance(value, str) else (value,):  # `--only ce` is a list of one
            try:
                return self._parser.parse_object({name: candidate}, defaults=False)[name]
            except ArgumentError:
                continue
        raise BadInput(flag, value, words(self.hint(name)))

    def _alternatives(self, name: str) -> str:
        known = near(name, self) or f": {', '.join(self) or 'it has none'}"
        return f"an option of {self.target.__name__}{known}"

    def plain(self, name: str, value: Any) -> Any:
        """An option's value as YAML and JSON have it: lists for tuples, text for paths and functions."""
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [self.plain(name, entry) for entry in value]
        text = self._parser.dump(Namespace({name: value}), skip_validation=True)
        return yaml.safe_load(text)[name]

    def instances(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values, with a new instance for each class among them, and the function for each function's name."""
        return dict(self._parser.instantiate(Namespace(dict(values))).items(branches=True, nested=False))


@functools.cache
def options_of(target: type, skip: frozenset[str] = frozenset()) -> Options:
    """The options of a class, but those to skip."""
    return Options(target, skip)


def words(hint: Any) -> str:
    """What a value of this type is, for a reader."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if origin in {typing.Union, types.UnionType}:
        kinds = dict.fromkeys(words(argument) for argument in arguments if argument is not Tensor)
        return ANYTHING if ANYTHING in kinds else " or ".join(kinds)
    if origin is typing.Literal:
        return ", ".join(str(argument) for argument in arguments)
    if origin is tuple:
        return f"[{', '.join(words(argument) for argument in arguments)}]"
    if inspect.isclass(origin) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return f"a list, [...], each {words(arguments[0])}"
    return ANYTHING if is_open(hint) else getattr(hint, "__name__", str(hint))


def whole_first(hint: Any) -> Any:
    """A union of numbers with int before float, so that 1 stays a count: whichever comes first takes it.

    Typing caches unions whatever their order, so what a signature says (Optional[Union[int, float]]) need not be what
    is found there.
    """
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) not in {typing.Union, types.UnionType} or not {int, float} <= {*kinds}:
        return hint
    others = [kind for kind in kinds if kind is not int]
    others.insert(others.index(float), int)
    return typing.Union[tuple(others)]  # noqa: UP007 - of a tuple


def accepts_null(hint: Any) -> bool:
    """Whether None is a value of this type."""
    return hint is type(None) or is_open(hint) or any(accepts_null(argument) for argument in typing.get_args(hint))


def is_open(hint: Any) -> bool:
    """Whether anything is a value of this type, as of an argument without one."""
    return hint in {Any, object} or type(hint).__name__ in {"UnvalidatedType", "UntypedType"}


def near(name: Any, known: Iterable[str], prefix: str = "") -> str:
    """The known names that look like this one, as the end of a message."""
    lower = {other.lower(): other for other in known}
    found = [lower[match] for match in difflib.get_close_matches(str(name).lower(), lower, 3, 0.6)]
    return f"; near: {', '.join(prefix + match for match in found)}" if found else ""
