"""From choices to instances: every error of a constructor names the whole flag."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from apprentice.errors import BadInput
from harness.config.choices import NOTHING, Choice
from harness.config.imports import imported
from harness.config.signatures import options_of

# What a constructor says about an option: its name, its value and what was expected.
REFUSAL = re.compile(r"(\w+) (.*?): expected (.*)")


def build(choice: Choice, key: str, **extra: Any) -> Any:
    """A new instance of the chosen class, and of those that its options choose.

    Args:
        choice: as `Parser.parse` gives it.
        key: where it stands on the command line, for messages.
        extra: more arguments, passed if the signature has them.

    Raises:
        BadInput: what the constructor refuses, with the whole flag.
    """
    make = factory(choice, key, **extra)
    with refusals(choice, key):
        return make()


def factory(choice: Choice, key: str, **extra: Any) -> Callable[..., Any]:
    """The chosen class with its options bound, waiting for positional arguments; it can be pickled."""
    return functools.partial(imported(choice.class_path, key), **arguments(choice, key, **extra))


def arguments(choice: Choice, key: str, **extra: Any) -> dict[str, Any]:
    """The keyword arguments of the chosen class: what they choose is built anew, what it takes of `extra` added."""
    options = options_of(imported(choice.class_path, key))
    built = {
        name: _built(value, f"{key}.{name}", extra) for name, value in choice.init_args.items() if _is_choice(value)
    }
    plain = {name: value for name, value in choice.init_args.items() if name not in built}
    with refusals(choice, key):
        plain = options.instances(plain)
    return {**plain, **built, **{name: value for name, value in extra.items() if name in options}}


def _is_choice(value: Any) -> bool:
    return isinstance(value, Choice) or (isinstance(value, list) and any(_is_choice(entry) for entry in value))


def _built(value: Any, key: str, extra: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_built(entry, f"{key}.{i}", extra) for i, entry in enumerate(value)]
    return build(value, key, **extra)


@contextmanager
def refusals(choice: Choice, key: str) -> Iterator[None]:
    """Turn what a constructor refuses into BadInput with the whole flag."""
    try:
        yield
    except BadInput as error:
        inside = error.flag == key or error.flag.startswith(f"{key}.")
        raise BadInput(error.flag if inside else f"{key}.{error.flag}", error.value, error.expected) from error
    except (ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        told = REFUSAL.fullmatch(message)
        if told and (place := _place(choice, told[1])):
            raise BadInput(f"{key}.{place}", told[2], told[3]) from error
        name = culprit(choice, message)
        if name:
            raise BadInput(f"{key}.{name}", choice.init_args[name], f"what {choice.name} takes: {message}") from error
        raise BadInput(key, choice.name, f"options that it takes: {message}") from error


def _place(choice: Choice, name: str) -> str | None:
    """Where an option of this name stands, below a choice or one of those that it chooses."""
    if name in choice.init_args:
        return name
    inner = ((key, _place(value, name)) for key, value in choice.init_args.items() if isinstance(value, Choice))
    return next((f"{key}.{place}" for key, place in inner if place), None)


def culprit(choice: Choice, message: str) -> str | None:
    """The one option, not at its default, that a message names, or whose value it does."""
    defaults = options_of(imported(choice.class_path, "")).defaults
    named = [
        name
        for name, value in choice.init_args.items()
        if str(value)
        and value != defaults.get(name, NOTHING)
        and re.search(rf"`{name}`|(?<![\w.]){re.escape(str(value))}(?![\w.]*\w)", message)
    ]
    return named[0] if len(named) == 1 else None
