"""What users did wrong, in one line with exit code 2; any other error keeps its traceback."""

import difflib
import errno
import os
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from apprentice.errors import BadInput
from harness.start import is_unread

if TYPE_CHECKING:
    from harness.cli.parser import Parser

FULL, KEPT = "no space left on the disk", "what was finished is kept"
WORDS = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null",
    timedelta: "a time, such as 0:30:00",
}  # fmt: skip
ANYTHING = "a value"
WORKER = re.compile(r"DataLoader worker (\(pid\D*\d+\) )?(is killed by signal: \w+|exited unexpectedly)")
# What torch says where memory ends, and how much torch and numpy wanted.
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC")
ALLOCATION = re.compile(r"allocate (memory: you tried to allocate )?(\d[\d.,]* \w+)")
GOES_ON = "--out FOLDER --resume true goes on from its checkpoint, if it left one"
# In which torchrun, Open MPI, SLURM and MPICH say which rank of its machine a process is.
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID")


@contextmanager
def one_line_errors(parser: "Parser | None" = None) -> Iterator[None]:
    """Turn bad input, what the Trainer or the disk refuses, and lost ranks into one line on stderr and exit code 2."""
    try:
        yield
    except Exception as error:
        line = None if is_unread(error) else one_line(error, parser)
        if line is None:
            raise
        local_rank = next((os.environ[name] for name in LOCAL_RANKS if name in os.environ), "0")
        # Each machine's first rank says what all find wrong; who has not come, any of the others.
        if local_rank == "0" or not isinstance(error, BadInput) or isinstance(error, OSError):
            sys.stderr.write(f"error: {' '.join(line.split())}\n")
        raise SystemExit(2) from None


def one_line(error: BaseException, parser: "Parser | None" = None, process: str = "this process") -> str | None:
    """Return the message of an error that users can do something about, a rank's too; `parser` finds whole flags."""
    if isinstance(error, ProcessRaisedException):
        # An error that could not be sent, for want of memory or disk, is known by torch's text alone.
        cause = error.__cause__ or RuntimeError(str(error))
        return one_line(cause, parser, f"rank {error.error_index}")
    if lost := _lost(error, process):
        return f"{lost}; {GOES_ON}"
    if isinstance(error, BadInput):
        flag = parser.flag_of(error.argument) if parser else error.argument
        return str(error) if flag is None else with_flag(BadInput(flag, error.value, error.expected))
    if isinstance(error, OSError) or "inline_container" in str(error):
        return _of_files(error)
    return f"--trainer: {error}" if isinstance(error, MisconfigurationException) else None


def with_flag(error: BadInput) -> str:
    """Return the message of bad input, whose argument is a flag."""
    return f"--{error}" if error.argument else str(error)


def _of_files(error: BaseException) -> str:
    if not isinstance(error, OSError):  # of torch.save
        return f"{FULL}, or it can't be written; {KEPT}"
    place = f": {error.filename}" if error.filename else ""
    return f"{FULL}{place}; {KEPT}" if error.errno == errno.ENOSPC else f"{error.strerror or error}{place}"


def _lost(error: BaseException, process: str) -> str | None:
    """Say which process died or had too little memory, and what helps."""
    if isinstance(error, ProcessExitedException):
        how = f"was killed by {error.signal_name}" if error.signal_name else f"ended with exit code {error.exit_code}"
        return f"rank {error.error_index} {how}"
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    if worker := WORKER.search(str(error)):
        return f"{worker[0]}; with fewer --data.num_workers it takes less memory"
    if not isinstance(error, MemoryError) and not OUT_OF_MEMORY.search(str(error)):
        return None
    allocation = ALLOCATION.search(str(error))
    amount = f" for {allocation[2]} more" if allocation else ""
    return f"{process} had no memory{amount}; with more --trainer.devices each needs less"


def near(name: Any, names: Iterable[str]) -> str:
    """Return the known names that look like this one, as the end of a message."""
    lower = {other.lower(): other for other in names}
    matches = [lower[match] for match in difflib.get_close_matches(str(name).lower(), lower, 3, 0.6)]
    return f"; near: {', '.join(matches)}" if matches else ""


def words(hint: Any) -> str:
    """Describe values of this type to users."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in WORDS:
        return WORDS[hint]
    if origin in {typing.Union, types.UnionType}:
        kinds = dict.fromkeys(words(argument) for argument in arguments if argument is not Tensor)
        return ANYTHING if ANYTHING in kinds else " or ".join(kinds)
    if origin is typing.Literal:
        return ", ".join(str(argument) for argument in arguments)
    if origin is tuple:
        return f"[{', '.join(words(argument) for argument in arguments)}]"
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return f"a list, [...], each {words(arguments[0])}"
    return ANYTHING if is_open(hint) else getattr(hint, "__name__", str(hint))


def is_open(hint: Any) -> bool:
    """Return whether a type takes anything, such as that of an argument without annotation."""
    return hint in {Any, object} or type(hint).__name__ in {"UnvalidatedType", "UntypedType"}
