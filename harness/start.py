"""The process of a script: its first line, before torch is loaded, and the terminal or pipe that it prints to.

Loading torch takes seconds and reads the environment. The pipe may lack characters, and may close before the end.
"""

import atexit
import codecs
import gc
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from harness import ranks

# Read by torch when it is loaded: its profiler logs to stderr, and so do ranks that lose another, with frames of C++.
LOGS = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PLAIN = {
    "Δ": "diff", "±": "+-", "µ": "u", "²": "2", "…": "...", "—": "-", "–": "-", "·": "*", "√": "sqrt", "×": "x",
}  # fmt: skip
STREAMS = (1, 2)  # descriptors of stdout and stderr
NO_READER = 141  # exit code: the shell's for SIGPIPE


def script(**variables: str) -> None:
    """Prepare the process for its imports, which take seconds, and longer where the disk is slow.

    A terminal shows a line at once. Ctrl-C ends them without a traceback; `session` handles signals after them.
    The script's folder is no place to import from: `attention.py` there would hide the user's own. Sets variables of
    the environment where the user has not.

    Raises:
        SystemExit: with code 2 where a launcher's variables are left over, see `ranks.check_variables`.
    """
    _open_streams()
    try:
        ranks.check_variables()
    except BadInput as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
    if sys.path[:1] == [str(Path(sys.argv[0]).resolve().parent)]:  # Python has put it there
        del sys.path[0]
    for name, value in {**LOGS, **variables}.items():
        os.environ.setdefault(name, value)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    gc.disable()  # what imports make stays: to look at it again and again takes 1.1 of 6.3 CPU seconds of --help
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write("loading torch and Lightning\n")


def _open_streams() -> None:
    """Lead streams that this process began without, as by `>&-`, nowhere.

    Else the first files that it opens would have their descriptors, and get what libraries print.
    """
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, descriptor)  # inherited by children; it is the same number, if the descriptor was free
            if nowhere != descriptor:
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def loaded() -> None:
    """Collect garbage again, but not among what the imports have made: that saves 0.8 of 6.0 CPU seconds of --help."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def called_as(script: str) -> str:
    """Return how to start an experiment: its script in a clone, or a sub-command of the installed `apprentice`."""
    if any(Path(word).name == "apprentice" for word in sys.orig_argv[:2]):
        return f"apprentice {Path(script).stem}"
    return f"python experiments/{script}"


def run(main: Callable[[], None]) -> None:
    """Run a script's main and end the process with its exit code.

    Threads are joined and exit functions run; Python does not take apart what was imported, which takes 0.5 of 5.7 CPU
    seconds of --help. It does after an error, and where a profiler, a debugger or an interactive interpreter goes on
    after the script.
    """
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str) or _is_watched():  # Python prints a text
            raise
        code = end.code
    finally:
        gc.unfreeze()  # extensions would call what is frozen at the end a leak
    if _is_watched():
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads, or it is closed
            stream.flush()
    os._exit(code or 0)


def _is_watched() -> bool:
    if sys.version_info >= (3, 12) and any(map(sys.monitoring.get_tool, range(6))):
        return True
    return bool(sys.flags.inspect or sys.getprofile() or sys.gettrace())


@contextmanager
def console() -> Iterator[None]:
    """Print plain characters where the stream's encoding lacks ours; end quietly when nobody reads any more.

    Raises:
        SystemExit: with code 141, where a write found the pipe closed, as by `| head -1`.
    """
    loaded()
    try:
        try:
            with _plain_characters():
                yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # at exit the interpreter would print a traceback of what fails
    except Exception as error:
        if not is_unread(error):
            raise
        leave()
        raise SystemExit(NO_READER) from None


@contextmanager
def _plain_characters() -> Iterator[None]:
    codecs.register_error("plain", _plain)
    streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper)]
    before = [stream.errors for stream in streams]
    for stream in streams:
        stream.reconfigure(errors="plain")
    try:
        yield
    finally:
        for stream, errors in zip(streams, before, strict=True):
            if not stream.closed:
                stream.reconfigure(errors=errors)


def printable(text: str) -> str:
    """The text as stdout shows it inside `console`, so that columns of a table are aligned."""
    if not (isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "plain"):
        return text
    return text.encode(sys.stdout.encoding, "plain").decode(sys.stdout.encoding)


def is_unread(error: Exception) -> bool:
    """Whether this error, or the rank's of which it tells, is that stdout or stderr was closed at the other end."""
    return "Broken pipe" in str(error) and any(map(_closed, STREAMS))


def leave() -> None:
    """Send to nowhere what is printed to a closed pipe or terminal from now on."""
    for stream in filter(_closed, STREAMS):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream)
        os.close(nowhere)


def _closed(descriptor: int) -> bool:
    if not hasattr(select, "poll"):  # on Windows
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(character, "?") for character in error.object[error.start : error.end]), error.end
