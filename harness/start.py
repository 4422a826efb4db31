"""The first line of a script; it loads nothing heavy."""

import os
import signal


def script() -> None:
    """Let Ctrl-C end the imports, which take seconds, without a traceback; `session` handles signals after them."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
