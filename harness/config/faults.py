"""Errors as users see them: one line, exit code 2. Anything that is not their doing keeps its traceback."""

import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from apprentice.errors import BadInput
from harness.config.building import REFUSAL
from harness.runs import launch as job

if TYPE_CHECKING:
    from harness.config.parser import Parser

# The last line that a rank which was started by fork leaves behind; what begins with a flag is said to users.
FROM_RANK = re.compile(
    r"([\w.]*\.)?(?P<kind>BadInput|MisconfigurationException|ValueError|\w+(?=: --)"
    r"|(OS|Permission|FileNotFound|Timeout|Connection)Error): (?P<told>.*)"
)


@contextmanager
def one_line_errors(parser: "Parser | None" = None) -> Iterator[None]:
    """What can't be used, what the Trainer or the disk refuses and ranks that are lost end the process with one line.

    Args:
        parser: knows the flags of what only shows to be wrong when it is used.
    """
    try:
        yield
    except Exception as error:
        line = one_line(error, parser)
        if line is None:
            raise
        if job.is_local_rank_zero() or not isinstance(error, BadInput):
            sys.stderr.write(f"error: {' '.join(line.split())}\n")
        raise SystemExit(2) from None


def one_line(error: Exception, parser: "Parser | None" = None) -> str | None:
    """The message of an error that users can do something about, None for others."""
    if isinstance(error, BadInput) or str(error).startswith("--"):
        return _told(str(error), parser)
    if isinstance(error, OSError):
        return _disk(error)
    if isinstance(error, ValueError):
        return _option(str(error), parser)
    if isinstance(error, ProcessRaisedException | ProcessExitedException):
        return _rank(error, parser)
    kind = type(error).__name__
    if kind == "RuntimeError" and "inline_container" in str(error):  # what torch.save makes of a full disk
        return "no space left on the disk, or it can't be written; what was finished is kept"
    return f"--trainer: {error}" if kind == "MisconfigurationException" else None


def _rank(error: ProcessRaisedException | ProcessExitedException, parser: "Parser | None") -> str | None:
    """What a rank that was forked said at last, or how it ended without a word."""
    if isinstance(error, ProcessExitedException):
        how = f"was killed by {error.signal_name}" if error.signal_name else f"ended with exit code {error.exit_code}"
        return f"rank {error.error_index} {how}; --out FOLDER --resume true goes on from its checkpoint, if it left one"
    told = FROM_RANK.fullmatch(str(error).strip().splitlines()[-1])
    refused = told and told["kind"] == "ValueError" and not told["told"].startswith("--")
    return told and (_option(told["told"], parser) if refused else _told(told["told"], parser))


def _told(message: str, parser: "Parser | None") -> str:
    """A message that begins with a flag; where that is an option alone, with the whole flag if it can be known."""
    return _option(message.removeprefix("--"), parser) or message


def _option(message: str, parser: "Parser | None") -> str | None:
    """What a class says about an option when it is used, with the whole flag."""
    told = REFUSAL.fullmatch(message)
    flag = parser.flag(told[1], told[2]) if parser and told else None
    return str(BadInput(flag, told[2], told[3])) if told and flag else None


def _disk(error: OSError) -> str:
    place = f": {error.filename}" if error.filename else ""
    if error.errno == errno.ENOSPC:
        return f"no space left on the disk{place}; what was finished is kept"
    return f"{error.strerror or error}{place}"
