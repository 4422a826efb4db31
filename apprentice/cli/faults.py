"""Errors as users see them: one line, exit code 2. Anything that is not their doing keeps its traceback."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from apprentice.errors import BadInput

# The last line that a rank which was started by fork leaves behind.
FROM_RANK = re.compile(
    r"([\w.]*\.)?(BadInput|MisconfigurationException|(OS|Permission|FileNotFound)Error): (?P<told>.*)"
)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What can't be used, and what the Trainer or the disk refuses, ends the process with one line on stderr."""
    try:
        yield
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        sys.stderr.write(f"error: {' '.join(line.split())}\n")
        raise SystemExit(2) from None


def one_line(error: Exception) -> str | None:
    """The message of an error that users can do something about, None for others."""
    if isinstance(error, BadInput):
        return str(error)
    if isinstance(error, OSError):
        return _disk(error)
    kind = type(error).__name__
    if kind == "RuntimeError" and "inline_container" in str(error):  # what torch.save makes of a full disk
        return "no space left on the disk, or it can't be written; what was finished is kept"
    if kind == "MisconfigurationException":
        return f"--trainer: {error}"
    if kind == "ProcessRaisedException":
        told = FROM_RANK.fullmatch(str(error).strip().splitlines()[-1])
        return told and told["told"]
    return None


def _disk(error: OSError) -> str:
    place = f": {error.filename}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no space left on the disk{place}; what was finished is kept"
    return f"{error.strerror or error}{place}"
