"""The first line of a script, before torch is loaded: that takes seconds, and reads the environment."""

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

# Read by torch when it is loaded: its profiler logs to stderr, and so do ranks that lose another, with frames of C++.
LOGS = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
PATIENCE = 1.0  # seconds until a user at a terminal is told that something is going on
_loading: list[threading.Timer] = []


def script(**variables: str) -> None:
    """Prepare the process for its imports, which take seconds.

    Ctrl-C ends them without a traceback; `session` handles signals after them. A terminal shows that they go on.
    The script's folder is no place to import from: `attention.py` there would hide the user's own.

    Args:
        variables: of the environment, where the user has not set them.
    """
    if sys.path[:1] == [str(Path(sys.argv[0]).resolve().parent)]:  # Python has put it there
        del sys.path[0]
    for name, value in {**LOGS, **variables}.items():
        os.environ.setdefault(name, value)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    gc.disable()  # what imports make stays: looking at it again and again takes a tenth of a short run
    timer = threading.Timer(PATIENCE, sys.stderr.write, ["loading torch and Lightning\n"])
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    _loading.append(timer)


def loaded() -> None:
    """Say no more that imports go on, and collect garbage again, but not among what they have made."""
    if not _loading:
        return
    _loading.pop().cancel()
    gc.freeze()
    gc.enable()


def run(main: Callable[[], None]) -> None:
    """Run a script's main and end the process with its exit code.

    Threads are joined and exit functions run; Python does not take apart what was imported, which takes two seconds.
    """
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):  # Python prints it
            raise
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads, or it is closed
            stream.flush()
    os._exit(code or 0)
