"""Classes chosen by short name or import path, such as `--data MNIST`, and instances of what was chosen."""

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from apprentice.errors import BadInput, reason
from harness.cli.messages import ARGUMENT, near
from harness.cli.signatures import Signature, options_of

MOST_HAVING = 6  # classes that have an option
MOST_NAMES = 8  # names in a message


@dataclass(frozen=True)
class Choice:
    """A class and its options; `build` makes an instance."""

    class_path: str  # where the class is imported from
    init_args: dict[str, Any] = field(default_factory=dict)  # by name; values may be choices and lists of choices

    @property
    def name(self) -> str:
        """The class's short name."""
        return self.class_path.rpartition(".")[2]

    @property
    def target(self) -> Any:
        """The class, or the function."""
        return import_target(self.class_path, "")

    @property
    def signature(self) -> Signature:
        """The options of the class."""
        return options_of(self.target)


Chosen: TypeAlias = Choice | list["Chosen"] | str | bool | None  # text: a name that Lightning looks up


@dataclass(frozen=True)
class Classes:
    """What a key chooses from: classes of a package by short name, any other by import path."""

    bases: tuple[type, ...]  # what the classes derive from; short names are those of subclasses of the first
    package: ModuleType  # where short names are looked up
    skip: frozenset[str] = frozenset()  # arguments of their constructors that are not options
    refused: Mapping[type, str] = field(default_factory=dict)  # classes that can't be used, with what to take instead

    is_switch: bool = False  # true and false are choices, too
    more: tuple[type, ...] = ()  # classes of ours that have short names beside the package's

    @property
    def by_name(self) -> dict[str, type]:
        """The package's classes, then ours, by short name; all are imported."""
        more = [chosen.__name__ for chosen in self.more]
        names = dict.fromkeys([*vars(self.package), *getattr(self.package, "__all__", ())])
        classes = {name: self.get(name) for name in [*(name for name in names if name not in more), *more]}
        return {name: chosen for name, chosen in classes.items() if chosen is not None}

    def get(self, name: str) -> type | None:
        """Return the class of a short name; None for no such class. A package may import it now."""
        chosen = next((ours for ours in self.more if ours.__name__ == name), getattr(self.package, name, None))
        return chosen if self.offers(chosen) and not name.startswith("_") else None

    def offers(self, chosen: Any) -> bool:
        """Return whether a class of the package is one to choose."""
        return (
            inspect.isclass(chosen) and issubclass(chosen, self.bases[0]) and chosen not in self.bases
            and not inspect.isabstract(chosen) and not issubclass(chosen, tuple(self.refused))
        )  # fmt: skip

    def find(self, name: Any, key: str) -> tuple[type | str | bool | None, Mapping[str, Any]]:
        """Find a class by name or import path, and the options that the name sets; BadInput if it can't be used."""
        if name is None:
            return None, {}
        if self.is_switch and str(name).lower() in {"true", "false"}:
            return str(name).lower() == "true", {}
        if isinstance(name, str) and "." in name:
            chosen: type | None = import_class(name, key, self.bases)
        else:
            chosen = self.get(str(name)) or {other.__name__: other for other in self.refused}.get(str(name))
        if chosen is None or chosen in self.bases:
            raise BadInput(key, name, self.expected(name))
        for refused, expected in self.refused.items():
            if issubclass(chosen, refused):
                raise BadInput(key, name, expected)
        return chosen, {}

    def is_same(self, name: Any, old: Any, options: Mapping[str, Any]) -> bool:
        """Return whether a name stands for the class of an old name, which has these options."""
        return self._whole(name) == self._whole(old)

    def _whole(self, name: Any) -> str:
        """Return an import path for a short name."""
        module = next((ours.__module__ for ours in self.more if ours.__name__ == name), self.package.__name__)
        return str(name) if "." in str(name) else f"{module}.{name}"

    def path(self, chosen: type, name: str) -> str:
        """Return the class path to write down: the package's if the class is there, that of ours, else the name."""
        inside = getattr(self.package, chosen.__name__, None) is chosen
        return self._whole(chosen.__name__) if inside or chosen in self.more else name

    def arguments_to_skip(self, chosen: Any) -> frozenset[str]:
        """Return the arguments of a class that are not options."""
        return self.skip

    def having(self, option: str, key: str) -> str:
        """Return the classes whose constructors name an option, as the end of a message; empty where none does."""
        names = [
            name for name, chosen in self.by_name.items()
            if chosen not in self.bases and option in inspect.signature(chosen).parameters
            and option not in self.arguments_to_skip(chosen)
        ]  # fmt: skip
        listed = ", ".join(names if len(names) <= MOST_HAVING else [*names[:MOST_HAVING], "..."])
        return f"; with --{key} {listed} there is {option}" if names else ""

    def expected(self, name: Any = "") -> str:
        """Return the short names, for a message, and those near to `name`."""
        names = list(self.by_name)
        listed = ", ".join(names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], "..."])
        return f"{listed} or the import path of a class{near(name, names)}"


def put_working_directory_first(module_name: str = "") -> None:
    """Let modules of the working directory come before others of the same name that are not loaded yet."""
    folder = str(Path.cwd())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    if module_name not in sys.modules:
        importlib.invalidate_caches()  # a file may be new


def import_target(path: str, key: str) -> Any:
    """Import a class, or a function, by its path, as `import_class` does."""
    put_working_directory_first(path.rpartition(".")[0])
    try:
        target = pkgutil.resolve_name(path)
    except Exception:  # noqa: BLE001 - of whatever kind: it is said below
        target = None
    return target if inspect.isfunction(target) else import_class(path, key)


def import_class(path: str, key: str, bases: tuple[type, ...] = (object,)) -> type:
    """Import a class by its path, from the working directory first; BadInput, with near names, if it is not there."""
    module_name, _, name = path.rpartition(".")
    put_working_directory_first(module_name)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module does
        raise BadInput(key, path, f"the import path of a class; {type(error).__name__}: {error}") from error
    target = getattr(module, name, None)
    if not inspect.isclass(target):
        classes = [name for name, x in vars(module).items() if inspect.isclass(x) and issubclass(x, bases)]
        hint = near(name, classes)
        raise BadInput(key, path, f"the import path of a class; {name} is no class of {module_name}{hint}")
    if not issubclass(target, bases):
        raise BadInput(key, path, f"a class derived from {' or '.join(base.__name__ for base in bases)}")
    return target


def _is_choice(value: Any) -> bool:
    return isinstance(value, Choice) or (isinstance(value, list) and any(map(_is_choice, value)))


def plain(chosen: Any) -> Any:
    """Convert a choice, or a list or mapping of choices, to plain data for YAML."""
    if isinstance(chosen, dict):
        return {name: plain(entry) for name, entry in chosen.items()}
    if isinstance(chosen, list):
        return [plain(entry) for entry in chosen]
    if not isinstance(chosen, Choice):
        return chosen
    options, values = chosen.signature, chosen.init_args.items()
    plain_values = {name: plain(value) if _is_choice(value) else options.plain(name, value) for name, value in values}
    return {"class_path": chosen.class_path, "init_args": plain_values}


def build(choice: Any, key: str, **extra: Any) -> Any:
    """Build a choice of `Parser.parse`, or each choice of a list, and what its options choose.

    `key` is where it stands on the command line; `extra` arguments are passed if the constructor takes them.

    Raises:
        BadInput: what the constructor refuses, with the whole flag.
    """
    if isinstance(choice, list):
        return [build(entry, f"{key}.{i}", **extra) for i, entry in enumerate(choice)]
    make = factory(choice, key, **extra)
    with refusals(choice, key, passed=extra):
        return make()


def factory(choice: Choice, key: str, **extra: Any) -> Callable[..., Any]:
    """Bind the options of the chosen class, which then takes positional arguments; the result can be pickled."""
    return functools.partial(choice.target, **arguments(choice, key, **extra))


def arguments(choice: Choice, key: str, **extra: Any) -> dict[str, Any]:
    """Return the keyword arguments of the chosen class, with instances of what they choose, and those of `extra`."""
    options, init_args = choice.signature, choice.init_args
    chosen = {name: build(value, f"{key}.{name}", **extra) for name, value in init_args.items() if _is_choice(value)}
    plain_args = {name: value for name, value in init_args.items() if name not in {*chosen, *extra}}
    with refusals(choice, key):
        values = options.instances(plain_args)
    return {**values, **chosen, **{name: value for name, value in extra.items() if name in options.hints}}


@contextmanager
def refusals(
    choice: Choice, key: str, kinds: tuple[type[Exception], ...] = (Exception,), passed: Collection[str] = ()
) -> Iterator[None]:
    """Turn errors of these kinds into BadInput with the whole flag; with key and class if they name no option.

    Those of files stay as they are. `passed` are arguments that no flag sets, such as those that the data determines.
    """
    try:
        yield
    except OSError:
        raise
    except BadInput as error:
        flag = error.argument
        if flag in passed:
            raise BadInput(key, choice.name, f"options that it takes: {error}") from error
        if flag != key and not flag.startswith(f"{key}."):
            flag = _place(choice, key, flag) or f"{key}.{flag}".removesuffix(".")
        whole = ARGUMENT.sub(
            lambda match: f"`{_place(choice, key, match[1]) or match[1]}{match[2] or ''}`", error.expected
        )
        raise BadInput(flag, error.value, whole) from error
    except kinds as error:
        message = reason(error) if isinstance(error, KeyError) else " ".join(str(error).split()) or reason(error)
        raise BadInput(key, choice.name, f"options that it takes: {message}") from error


def _place(choice: Choice, key: str, argument: str) -> str | None:
    """Return the flag of an option of this name, or of that of a class among the options."""
    if argument in choice.init_args:
        return f"{key}.{argument}"
    inside = {name: value for name, value in choice.init_args.items() if isinstance(value, Choice)}
    places = (_place(value, f"{key}.{name}", argument) for name, value in inside.items())
    return next(filter(None, places), None)
