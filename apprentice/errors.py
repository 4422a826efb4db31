"""Bad input of the user as an object: which argument, its value, and what was expected."""

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 1000  # characters of a value in a message: enough for any path


class BadInput(ValueError):  # noqa: N818 - it names the fault, and users read it
    """A value that can't be used; the command line prints it as one line and exits with code 2.

    Args:
        argument: the name of the argument, dotted for an object inside another (`data.root`); "" for none.
        value: what was passed.
        expected: what would have been right, or why nothing would: a text that begins with "not allowed".
    """

    def __init__(self, argument: str, value: object, expected: str) -> None:
        self.argument, self.value, self.expected = argument, value, expected
        super().__init__(argument, value, expected)

    def __str__(self) -> str:
        argument = f"{shorten(self.argument)} " if self.argument else ""
        fault = self.expected if self.expected.startswith("not allowed") else f"expected {self.expected}"
        return f"{argument}{shorten(str(self.value))}: {fault}"


@contextmanager
def naming(argument: str) -> Iterator[None]:
    """Put `argument` and a dot before the argument of a BadInput that the block raises."""
    try:
        yield
    except BadInput as fault:
        raise BadInput(f"{argument}.{fault.argument}".removesuffix("."), fault.value, fault.expected) from None


def shorten(text: str) -> str:
    """Cut a text to at most `LONGEST` characters; quotes stand for an empty one."""
    return text or "''" if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def reason(error: Exception) -> str:
    """Return an error's message in one line; with its class where the message is empty, or only a key."""
    line = first_line(error)
    return line if line and not isinstance(error, KeyError) else f"{type(error).__name__}: {line}".removesuffix(": ")
