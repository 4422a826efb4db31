"""The options of a class: its constructor's typed arguments, as a jsonargparse parser made for the class has them."""

import functools
import inspect
import pkgutil
import types
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentParser, Namespace

from apprentice.errors import BadInput, first_line
from harness.cli.messages import is_open, near_flag, words

Missing = inspect.Parameter.empty  # the value of a required option that was not given


class Signature:
    """Names, types, defaults and descriptions of the options of a class, or of a function.

    jsonargparse resolves the constructor, through `**kwargs` too, and checks, serializes and instantiates values. Each
    option is checked by itself, so that an error belongs to one flag. `skip` are arguments that are not options,
    perhaps with what to do instead; `types` replace types of the constructor.
    """

    def __init__(self, target: Any, skip: Iterable[str] = (), types: Mapping[str, Any] | None = None) -> None:
        self.target, parameters = target, inspect.signature(target).parameters
        self._skip, self._instead = frozenset(skip), skip if isinstance(skip, Mapping) else {}
        self.path = f"{target.__module__}.{target.__qualname__}"
        self._parser = ArgumentParser(exit_on_error=False, add_help=False)
        add = self._parser.add_class_arguments if inspect.isclass(target) else self._parser.add_function_arguments
        add(target, skip={*skip}, as_group=False, fail_untyped=False)
        self.hints, self.defaults = dict[str, Any](), dict[str, Any]()  # by name
        self.help: dict[str, str] = {}
        about = _field_docs(target)
        names = set(self._parser.get_defaults().keys())
        for name, action in ((action.dest, action) for action in self._parser._actions if action.dest in names):
            if hasattr(action, "_typehint"):
                action._typehint = _int_first((types or {}).get(name, action._typehint))
            self.hints[name] = getattr(action, "_typehint", action.type)
            self.help[name] = about.get(name) or action.help or ""
            needed = action.required or (name in parameters and parameters[name].default is Missing)
            self.defaults[name] = Missing if needed else action.default
            action.required = False

    def check(self, name: str, value: Any, key: str = "") -> Any:
        """Convert a value to the option's type, or raise BadInput; text is YAML where the type is not text."""
        flag = f"{key}.{name}" if key else name
        if name not in self.hints:
            raise BadInput(flag, value, self.alternatives(name))
        hint = self.hints[name]
        if value is None and accepts_null(hint):
            return None
        if isinstance(value, str) and value != "null" and hint in (str, str | None):
            return value  # as it stands: YAML might take it for a comment or a number
        candidates = [value, [value]] if isinstance(value, str) else [value]  # `--only ce` is a list of one
        for candidate in candidates if value is not None else ():
            with suppress(ArgumentError, ValueError, TypeError, LookupError):  # the last three by YAML as `!!int x`
                return self._parser.parse_object({name: candidate}, defaults=False)[name]
        raise BadInput(flag, "null" if value is None else value, words(hint) + _fault_of_path(value, hint))

    def alternatives(self, name: str) -> str:
        """Return what to take in place of an option that does not exist."""
        if name in self._instead:
            return self._instead[name]
        other = getattr(self.target, "replaces", None)  # Lightning's class, whose short name ours has
        if other is not None and name in options_of(other, self._skip).hints:
            lightnings = f"--trainer.strategy {other.__module__}.{other.__name__}"
            return f"not allowed with {self.target.__name__}; Lightning's class has it, {lightnings}"
        hint = near_flag(name, self.hints) or f": {', '.join(self.hints) or 'it has none'}"
        return f"an option of {self.target.__name__}{hint}"

    def plain(self, name: str, value: Any) -> Any:
        """Return a value as YAML and JSON have it: lists for tuples, text for paths and functions."""
        if isinstance(value, str) and isinstance(value, Enum) and self.hints.get(name) is str:
            return value.value  # a default of Lightning's
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [self.plain(name, entry) for entry in value]
        return yaml.safe_load(self._parser.dump(Namespace({name: value}), skip_validation=True))[name]

    def instances(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Instantiate the classes among the values, and replace names of functions by the functions."""
        return dict(self._parser.instantiate(Namespace(dict(values))).items(branches=True, nested=False))


def _field_docs(target: Any) -> dict[str, str]:
    """Return what a dataclass and its bases say of each field: in docstrings below the fields, or in their own."""
    bases = [base for base in reversed(getattr(target, "__mro__", ())) if is_dataclass(base)]
    parsed = [param for base in bases for param in parse_from_object(base).params]
    return {param.arg_name: param.description or "" for param in parsed}


# Of a class, and of a frozenset of arguments to skip.
options_of: Callable[..., Signature] = functools.cache(Signature)


def kinds_of(hint: Any) -> Iterator[Any]:
    """Yield the types that a type is made of, but not those inside `type[...]` and `Callable[...]`."""
    if typing.get_origin(hint) not in {type, Callable}:
        yield hint
        for argument in typing.get_args(hint):
            yield from kinds_of(argument)


def accepts_null(hint: Any) -> bool:
    """Return whether None is a value of this type."""
    return any(kind is type(None) or is_open(kind) for kind in kinds_of(hint))


def _fault_of_path(path: Any, hint: Any) -> str:
    """Say, as the end of a message, why a path is not that of a class or function as the type has it."""
    origins = {typing.get_origin(kind) for kind in (hint, *typing.get_args(hint))}
    if not ({type, Callable} & origins and isinstance(path, str) and "." in path):
        return ""
    try:
        target = pkgutil.resolve_name(path)
    except Exception as error:  # noqa: BLE001 - whatever a user's module does
        return f"; {type(error).__name__}: {first_line(error)}"
    return "; a function is annotated with what it returns" if inspect.isfunction(target) else "; it is of another kind"


def _int_first(hint: Any) -> Any:
    """Return a union with int before float: jsonargparse takes the first type that fits, and 1 stays a count."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) not in {typing.Union, types.UnionType} or not {int, float} <= {*kinds}:
        return hint
    return typing.Union[(int, *(kind for kind in kinds if kind is not int))]
