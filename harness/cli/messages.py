"""What users did wrong, in one line with exit code 2; any other error keeps its traceback."""

import difflib
import errno
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from apprentice.errors import BadInput
from harness.ranks import is_first_of_machine
from harness.start import is_unread

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
# What many programs call an option, and the last words of its name here.
USUAL = {
    "amp": "precision", "bs": "batch_size", "device": "accelerator devices", "epochs": "max_epochs", "gpus": "devices",
    "learning_rate": "lr", "output_dir": "out", "seed": "seeds", "wd": "weight_decay", "workers": "num_workers",
}  # fmt: skip
OF_TEACHER = "teacher_"  # how flags of the teacher's own training begin
GOES_ON = "--out FOLDER --resume true goes on from its checkpoint, if it left one"
ARGUMENT = re.compile(
    r"(?<!`)`([a-z]\w*(?:\.[\w-]+)*)( [^`]+)?`(?!`)"
)  # in a text of the layers below, with or without a value


class FindsFlags(Protocol):
    """What a parser knows of flags after it has parsed a command line."""

    def flag_of(self, argument: str) -> str | None:
        """Find the flag of an argument that an object refused."""

    def is_flag(self, name: str) -> bool:
        """Return whether the command line has this flag, or flags that begin like it."""


@contextmanager
def one_line_errors(parser: FindsFlags | None = None) -> Iterator[None]:
    """Turn bad input, what the Trainer or the disk refuses, and lost ranks into one line on stderr and exit code 2."""
    try:
        yield
    except Exception as error:
        line = None if is_unread(error) else one_line(error, parser)
        if line is None:
            raise
        # Each machine's first rank says what all find wrong; who has not come, any of the others.
        if is_first_of_machine() or not isinstance(error, BadInput) or isinstance(error, OSError):
            sys.stderr.write(f"error: {' '.join(line.split())}\n")
        raise SystemExit(2) from None


def one_line(error: BaseException, parser: FindsFlags | None = None, process: str = "this process") -> str | None:
    """Return the message of an error that users can do something about, a rank's too; `parser` finds whole flags."""
    if isinstance(error, ProcessRaisedException):
        # An error that could not be sent, for want of memory or disk, is known by torch's text alone.
        cause = error.__cause__ or RuntimeError(str(error))
        return one_line(cause, parser, f"rank {error.error_index}")
    if lost := _lost(error, process):
        return f"{lost}; {GOES_ON}"
    if isinstance(error, BadInput):
        flag = parser.flag_of(error.argument) if parser else error.argument
        line = str(error) if flag is None else with_flag(BadInput(flag, error.value, error.expected))
        return as_flags(line, parser) if parser else line
    if isinstance(error, OSError) or "inline_container" in str(error):
        line = _of_files(error)
        return as_flags(line, parser) if parser else line
    return f"--trainer: {error}" if isinstance(error, MisconfigurationException) else None


def with_flag(error: BadInput) -> str:
    """Return the message of bad input, whose argument is a flag."""
    return f"--{error}" if error.argument else str(error)


def as_flags(text: str, parser: FindsFlags) -> str:
    """Write arguments that a text has in backticks as flags: `data.pack false` becomes --data.pack false."""
    return ARGUMENT.sub(lambda found: f"--{found[0][1:-1]}" if parser.is_flag(found[1]) else found[0], text)


def argv_of(flags: Mapping[str, Any]) -> list[str]:
    """Return flags and their values as words of a command."""
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


def _of_files(error: BaseException) -> str:
    if not isinstance(error, OSError):  # of torch.save
        return f"{FULL}, or it can't be written; {KEPT}"
    place = f": {error.filename}" if error.filename else ""
    what = FULL if error.errno == errno.ENOSPC else str(error.strerror or error)
    return f"{what}{place}; {KEPT}" if error.errno in {errno.ENOSPC, errno.EIO} else f"{what}{place}"


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


def near_flag(flag: str, names: Iterable[str], prefix: str = "") -> str:
    """Return flags with this one's last word, or what that usually means, as the end of a message; else near ones."""
    flags, name = {other.lower(): other for other in names}, flag.replace("-", "_").lower()
    by_word: dict[str, list[str]] = {usual: [] for usual in USUAL}
    for other in flags:
        if not other.startswith(OF_TEACHER) or other.removeprefix(OF_TEACHER) not in flags:
            by_word.setdefault(other.rpartition(".")[2], []).append(other)
    for usual, meant in USUAL.items():
        by_word[usual] = [other for word in meant.split() for other in by_word.get(word, ())] + by_word[usual]
    word = name.rpartition(".")[2]
    alike = difflib.get_close_matches(name, flags, 3, 0.6)
    same = by_word.get(word) or [
        x for close in difflib.get_close_matches(word, by_word, 3, 0.75) for x in by_word[close]
    ]
    matches = dict.fromkeys([*alike, *same] if "." in name else same or alike)
    listed = [prefix + flags[match] for match in [*matches][:3]]
    return f"; near: {', '.join(listed)}" if listed else ""


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
    if origin in {type, Callable}:
        hint = "the import path of a class"
    return ANYTHING if is_open(hint) else getattr(hint, "__name__", str(hint))


def is_open(hint: Any) -> bool:
    """Return whether a type takes anything, such as that of an argument without annotation."""
    return hint in {Any, object} or type(hint).__name__ in {"UnvalidatedType", "UntypedType"}
