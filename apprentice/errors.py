"""What the user did wrong, in one line."""


class BadInput(ValueError):  # noqa: N818 - it names the fault, and is read by users
    """A value that can't be used: the command line prints it as one line and ends with exit code 2.

    Args:
        flag: the option as it stands on the command line, without dashes (`data.root`); in a notebook, the argument.
        value: what was given.
        expected: what would have been right.
    """

    def __init__(self, flag: str, value: object, expected: str) -> None:
        self.flag, self.value, self.expected = flag, value, expected
        super().__init__(flag, value, expected)

    def __str__(self) -> str:
        return f"--{self.flag} {self.value}: expected {self.expected}"


def is_utf8(text: str) -> bool:
    """Whether a text can be written; a file's name may have other bytes, for which Python has surrogates."""
    return text.encode(errors="replace").decode() == text
