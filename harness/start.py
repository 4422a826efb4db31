"""The first line of a script, before torch is loaded: that takes seconds, and reads the environment."""

import os
import signal
import sys
import threading
from pathlib import Path

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
    if sys.stderr.isatty():
        timer = threading.Timer(PATIENCE, sys.stderr.write, ["loading torch and Lightning\n"])
        timer.daemon = True
        timer.start()
        _loading.append(timer)


def loaded() -> None:
    """Say no more that imports go on."""
    while _loading:
        _loading.pop().cancel()
