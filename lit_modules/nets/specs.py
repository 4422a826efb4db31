"""Objects that record their class and constructor arguments as plain data, and can be rebuilt from it.

The data is what a checkpoint holds as hyperparameters: numbers, texts, lists and mappings, which are read without
running code. It has `class_path` and `init_args`, as Lightning's configuration files have.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, get_type_hints

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from apprentice.errors import BadInput

Spec = Mapping[str, Any]  # class_path, init_args; `waits: true` for a function that makes the object
PLAIN = bool | int | float | str | None


class UnplainError(TypeError):
    """A value that can't be written as plain data."""


class Recorded:
    """Records its constructor's arguments, with defaults, as plain data; a base before `nn.Module`.

    Attributes:
        init_args: arguments by name, as plain data; those that are no plain data are left out.
        untrained: options to change when it is rebuilt to get the weights of a file.
    """

    init_args: dict[str, Any]
    untrained: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        record_arguments(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(self).setdefault("init_args", {})  # of a class without a constructor of its own
        super().__init__(*args, **kwargs)

    @classmethod
    def rebuild_arguments(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by which an object of these arguments is rebuilt, to get the weights of a file."""
        return {**arguments, **cls.untrained}


KINDS = (Recorded, nn.Module, Optimizer, LRScheduler)  # what may be rebuilt from a file


def record_arguments(cls: type) -> None:
    """Let the constructor of a class write its arguments, as plain data, into the object's `init_args`."""
    if "__init__" in vars(cls):
        type.__setattr__(cls, "__init__", _recording(vars(cls)["__init__"]))


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor: the outermost, that of the object's class, records its arguments."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        if "init_args" not in vars(self):
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{init.__qualname__}() {error}") from None
            bound.apply_defaults()
            vars(self)["init_args"] = _plain_arguments(bound)
        init(self, *args, **kwargs)

    vars(record)["__signature__"] = signature  # `inspect.getfullargspec`, which Lightning uses, follows no wrapper
    return record


def _plain_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    kinds, plain = inspect.Parameter, dict[str, Any]()
    for parameter in list(bound.signature.parameters.values())[1:]:
        value = bound.arguments[parameter.name]
        arguments = value if parameter.kind is kinds.VAR_KEYWORD else {parameter.name: value}
        for name, argument in arguments.items() if parameter.kind is not kinds.VAR_POSITIONAL else ():
            with suppress(UnplainError):
                plain[name] = to_plain(argument)
    return plain


def to_plain(value: Any) -> Any:
    """Convert a value to plain data: recorded objects, classes with bound options and torch's types become specs.

    So do functions that are annotated to return a module.

    Raises:
        UnplainError: a value has no such form.
    """
    if isinstance(value, Path | PLAIN):
        return str(value) if isinstance(value, Path) else value
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): to_plain(item) for name, item in value.items()}
    if isinstance(value, torch.dtype):
        return {"class_path": str(value)}
    if isinstance(value, Recorded | nn.Module) and "init_args" in vars(value):
        arguments = vars(value)["init_args"]
        arguments = value.rebuild_arguments(arguments) if isinstance(value, Recorded) else arguments
        return {"class_path": path_of(type(value)), "init_args": arguments}
    if (inspect.isclass(value) and issubclass(value, nn.Module)) or _makes_module(value):
        value = functools.partial(value)
    if isinstance(value, functools.partial) and (inspect.isclass(value.func) or _makes_module(value.func)):
        bound = inspect.signature(value.func).bind_partial(*value.args, **value.keywords).arguments
        return {"class_path": path_of(value.func), "init_args": to_plain(bound), "waits": True}
    raise UnplainError(type(value).__name__)


def rebuild(value: Any, flag: str = "net") -> Any:
    """Rebuild objects, with new weights, from their specs in plain data; other values stay.

    BadInput if there is no such class, it is no net, objective, task, optimizer or scheduler, or refuses its arguments.
    """
    if isinstance(value, list | tuple):
        return type(value)(rebuild(item, flag) for item in value)
    if not isinstance(value, Mapping):
        return value
    if not ("class_path" in value and set(value) <= {"class_path", "init_args", "waits"}):  # no object, but a mapping
        return {name: rebuild(item, flag) for name, item in value.items()}
    target = _import(value["class_path"], flag)
    if isinstance(target, torch.dtype):
        return target
    arguments = rebuild(value.get("init_args", {}), flag)
    if value.get("waits"):
        return functools.partial(target, **arguments) if arguments else target
    try:
        return target(**arguments)
    except TypeError as error:
        raise BadInput(flag, value["class_path"], f"arguments that it takes: {error}") from error


def path_of(target: Any) -> str:
    """Return the import path of a class or function; raise UnplainError if it is defined inside of a function."""
    if "<" in target.__qualname__:  # <locals>, <lambda>
        raise UnplainError(target.__qualname__)
    return f"{target.__module__}.{target.__qualname__}"


def _makes_module(target: Any) -> bool:
    """Return whether this is a function that is annotated to return a module."""
    try:
        made = get_type_hints(target).get("return") if inspect.isfunction(target) else None
    except Exception:  # noqa: BLE001 - an annotation may be for type checkers or people alone
        return False
    return inspect.isclass(made) and issubclass(made, nn.Module)


def _import(path: str, flag: str) -> Any:
    module, _, name = str(path).rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(flag, path, f"the import path of a class ({error})") from None
    is_class = inspect.isclass(target) and issubclass(target, KINDS)
    if not (is_class or isinstance(target, torch.dtype) or _makes_module(target)):
        raise BadInput(flag, path, "a net, an objective, a task, an optimizer or a scheduler")
    return target
