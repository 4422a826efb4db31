"""What stands at the keys of a command line."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from harness.cli.signatures import Signature

Fixed: TypeAlias = Callable[[Mapping[str, Any]], Iterable[str]]  # the choices of the keys so far -> names


@dataclass(frozen=True)
class Entry:
    """What stands at a key: the options of one class, or a choice, or texts."""

    options: Signature | None = None  # of the one class
    named: bool = False  # there are many, by names of the user's own
    fixed: Fixed | None = None  # names the arguments of constructors that earlier choices give
    unless: str = ""  # the key of choices by names: where there are some, none is made here
    like: str = ""  # the key whose class and options this one has where options are set and no class
    about: str = ""  # what it is, for the help
