"""The first line of a script, before torch is loaded: that takes seconds, and reads the environment."""

import os
import signal


def script() -> None:
    """Let Ctrl-C end the imports without a traceback, and a lost rank without frames of C++ from the others.

    `session` handles signals after the imports.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
