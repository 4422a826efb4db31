"""From choices to instances: an error of a constructor names the whole flag."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from apprentice.errors import BadInput
from harness.config.classes import Choice, imported, is_choice
from harness.config.messages import REFUSAL
from harness.config.signatures import options_of


def build(choice: Choice, key: str, **extra: Any) -> Any:
    """A new instance of the chosen class, and of those that its options choose.

    Args:
        choice: as `Parser.parse` gives it.
        key: where it stands on the command line, for messages.
        extra: more arguments, passed if the constructor takes them.

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
    """The keyword arguments of the chosen class, with new instances of what they choose, and those of `extra`."""
    options, given = options_of(imported(choice.class_path, key)), choice.init_args.items()
    chosen = {name: _built(value, f"{key}.{name}", extra) for name, value in given if is_choice(value)}
    with refusals(choice, key):
        values = options.instances({name: value for name, value in given if name not in chosen})
    return {**values, **chosen, **{name: value for name, value in extra.items() if name in options.hints}}


def _built(value: Any, key: str, extra: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_built(entry, f"{key}.{i}", extra) for i, entry in enumerate(value)]
    return build(value, key, **extra)


@contextmanager
def refusals(choice: Choice, key: str, kinds: tuple[type[Exception], ...] = (ValueError, TypeError)) -> Iterator[None]:
    """Turn errors of these kinds into BadInput with the whole flag; with key and class if they name no option."""
    try:
        yield
    except BadInput as error:
        inside = error.flag == key or error.flag.startswith(f"{key}.")
        flag = error.flag if inside else f"{key}.{_place(choice, error.flag) or error.flag}"
        raise BadInput(flag, error.value, error.expected) from error
    except kinds as error:
        message = " ".join(str(error).split())
        option = REFUSAL.fullmatch(message)
        if option and (place := _place(choice, option[1])):
            raise BadInput(f"{key}.{place}", option[2], option[3]) from error
        raise BadInput(key, choice.name, f"options that it takes: {message}") from error


def _place(choice: Choice, name: str) -> str | None:
    if name in choice.init_args:
        return name
    inner = ((key, _place(value, name)) for key, value in choice.init_args.items() if isinstance(value, Choice))
    return next((f"{key}.{place}" for key, place in inner if place), None)
