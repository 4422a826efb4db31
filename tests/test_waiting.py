"""Waits in tests hold on a loaded machine, and where a shell ignores SIGINT."""

import multiprocessing
import signal
import time
from collections.abc import Callable

import pytest

from tests import waiting


def works() -> None:
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass


def sleeps() -> None:
    time.sleep(60)


@pytest.mark.parametrize(("does", "ends"), [(works, True), (sleeps, False)])
def test_a_process_is_waited_for_as_long_as_it_works(does: Callable[[], None], ends: bool) -> None:
    process = multiprocessing.get_context("fork").Process(target=does)
    process.start()
    try:
        assert waiting.wait(lambda: process.exitcode is not None, lambda: [process.pid or 0], idle=0.3) is ends
    finally:
        process.kill()
        process.join()


def test_a_process_that_gives_its_memory_back_is_waited_for() -> None:
    """The kernel no longer shows its environment, by which tests know it, and has no code for it yet."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1.5,))
    process.start()
    assert waiting.wait(lambda: process.exitcode is not None, list, idle=60)


def test_an_ignored_interrupt_is_heeded() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        waiting.heed_interrupts()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
