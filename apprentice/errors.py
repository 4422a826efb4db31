"""Invalid input of the user, reported in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

SHOWN = 1000  # characters of a value in a message: enough for any path


class BadInput(ValueError):  # noqa: N818 - it names the fault, and users read it
    """A value that can't be used; the command line prints it as one line and exits with code 2.

    Args:
        flag: the option as on the command line, without dashes (`data.root`); in a notebook, the argument; "" for none.
        value: what was given.
        expected: what would have been right.
    """

    def __init__(self, flag: str, value: object, expected: str) -> None:
        self.flag, self.value, self.expected = flag, value, expected
        super().__init__(flag, value, expected)

    def __str__(self) -> str:
        flag = f"--{shorten(self.flag)} " if self.flag else ""
        return f"{flag}{shorten(str(self.value))}: expected {self.expected}"


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Put `flag` and a dot before the flag of a BadInput that the block raises; `flag` alone if that names none."""
    try:
        yield
    except BadInput as fault:
        raise BadInput(f"{flag}.{fault.flag}".removesuffix("."), fault.value, fault.expected) from None


def shorten(text: str) -> str:
    """The text as a message shows it: at most `SHOWN` characters, and quotes in place of nothing."""
    return text or "''" if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def first_line(error: Exception) -> str:
    """The first line of an error's message."""
    return str(error).partition("\n")[0]


def reason(error: Exception) -> str:
    """What an error says in a line; with its kind where there is no message, or only a key."""
    line = first_line(error)
    return line if line and not isinstance(error, KeyError) else f"{type(error).__name__}: {line}".removesuffix(": ")
