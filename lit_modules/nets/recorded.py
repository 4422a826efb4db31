"""Objects that remember, as plain data, the class and the arguments that they were made with, and can be made again.

The data is what a checkpoint holds as hyperparameters: numbers, texts, lists and mappings, so that it can be read
without running code. It is the same `class_path` and `init_args` as in Lightning's configuration files.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from apprentice.errors import BadInput

Spec = Mapping[str, Any]  # class_path, init_args, and for a function that makes it, waits: true
PLAIN = bool | int | float | str | None


class UnplainError(TypeError):
    """A value that can't be written as plain data."""


class Recorded:
    """Remembers its constructor's arguments; a base before `nn.Module`, whose `__init__` each constructor calls.

    Attributes:
        init_args: by name, as plain data; those that can't be are left out.
        untrained: options, with values by which it is made again to get weights of a file, where that differs.
    """

    init_args: dict[str, Any]
    untrained: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.init_args = _recorded(self, sys._getframe(1))

    @classmethod
    def remade_by(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by which one made with these is made again, to get weights of a file."""
        return {**arguments, **cls.untrained}


KINDS = (Recorded, nn.Module, Optimizer, LRScheduler)  # what may be made again from a file


def _recorded(recorded: Recorded, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the outermost constructor: as Lightning's `save_hyperparameters`, that of the object's class."""
    arguments: dict[str, Any] = {}
    while frame is not None and frame.f_code.co_name == "__init__":
        names, _, more, values = inspect.getargvalues(frame)
        if not names or values[names[0]] is not recorded:
            break
        arguments = {name: values[name] for name in names[1:]} | (values[more] if more else {})
        frame = frame.f_back
    found = {}
    for name, value in arguments.items():
        try:
            found[name] = plain(value)
        except UnplainError:
            continue
    return found


def plain(value: Any) -> Any:
    """A value as plain data: recorded objects, classes with bound options and torch's types are specs.

    Raises:
        UnplainError: it can't be.
    """
    if isinstance(value, Path | PLAIN):
        return str(value) if isinstance(value, Path) else value
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, torch.dtype):
        return {"class_path": str(value)}
    if isinstance(value, Recorded):
        return {"class_path": path_of(type(value)), "init_args": value.remade_by(value.init_args)}
    if isinstance(value, functools.partial) and inspect.isclass(value.func):
        bound = inspect.signature(value.func).bind_partial(*value.args, **value.keywords).arguments
        return {"class_path": path_of(value.func), "init_args": plain(bound), "waits": True}
    raise UnplainError(type(value).__name__)


def made(value: Any, flag: str = "net") -> Any:
    """What `plain` was given: objects are made again from their specs, with new weights; other values stay.

    Raises:
        BadInput: there is no such class, it is no net, objective, task, optimizer or scheduler, or refuses its
            arguments.
    """
    if isinstance(value, list | tuple):
        return type(value)(made(each, flag) for each in value)
    if not isinstance(value, Mapping):
        return value
    if not is_spec(value):
        return {name: made(each, flag) for name, each in value.items()}
    found = _imported(value["class_path"], flag)
    if isinstance(found, torch.dtype):
        return found
    arguments = made(value.get("init_args", {}), flag)
    if value.get("waits"):
        return functools.partial(found, **arguments)
    try:
        return found(**arguments)
    except TypeError as error:
        raise BadInput(flag, value["class_path"], f"arguments that it takes: {error}") from error


def is_spec(value: Any) -> bool:
    """Whether plain data stands for an object."""
    return isinstance(value, Mapping) and "class_path" in value and set(value) <= {"class_path", "init_args", "waits"}


def path_of(cls: type) -> str:
    """The import path of a class; UnplainError if it is defined inside of a function."""
    if "<locals>" in cls.__qualname__:
        raise UnplainError(cls.__qualname__)
    return f"{cls.__module__}.{cls.__qualname__}"


def _imported(path: str, flag: str) -> Any:
    module, _, name = str(path).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(flag, path, f"the import path of a class ({error})") from None
    if not (isinstance(found, torch.dtype) or (inspect.isclass(found) and issubclass(found, KINDS))):
        raise BadInput(flag, path, "a net, an objective, a task, an optimizer or a scheduler")
    return found
