"""Calls and fits in processes of their own, so that one device's fit is measured as clean as a rank of many."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch import Trainer
from torch.multiprocessing.spawn import start_processes

from harness.runs import environment, signals


@contextmanager
def one_thread() -> Iterator[int]:
    """Inside the block torch computes with one thread here; yields the number outside of it.

    OpenMP's threads are not forked along: a child that wants more than one would wait for them, if its parent had them.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def usual_threads(input_shape: Sequence[int], threads: int) -> int:
    """How many of these threads an experiment on one device would use for such images."""
    torch.set_num_threads(threads)  # starts none
    environment.limit_threads(input_shape)
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    return usual


@contextmanager
def none_left(patience: float = 3.0) -> Iterator[None]:
    """When the block raises, processes that were started in it end too, killed if need be.

    A rank that waits for another inside a collective hears no signal, and would be waited for at this process's end.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        started = set(multiprocessing.active_children()) - before
        try:
            deadline = time.monotonic() + patience
            for process in started:
                process.join(max(deadline - time.monotonic(), 0))
        finally:
            for process in started:
                process.kill()
        raise


def can_fork() -> bool:
    """Whether a process forked from this one can train on any device."""
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


def alone(function: Callable[[], object], threads: int) -> None:
    """Call the function in a forked process; where there is no fork, in this one.

    Args:
        function: what it does is lost, but for files.
        threads: with which torch computes there; more than one only if this process has kept to one.

    Raises:
        Interrupted: the user asked to stop, and it is not one that sees to that itself.
        ProcessRaisedException: it raised.
        ProcessExitedException: its process died.
    """
    if can_fork():
        process = start_processes(_call, args=(function, threads), nprocs=1, join=False, start_method="fork")
        while not process.join(timeout=0.1):
            if not signals.deferring():
                signals.stop_if_requested()  # an exception that a signal raises inside a fork is lost
    else:
        function()


def fitted(trainer: Trainer, fit: Callable[[], object], threads: int) -> None:
    """Fit in processes that end with it; a signal ends the fit where its callbacks ask for that.

    Args:
        trainer: whose fit it is.
        fit: begins it.
        threads: of a process that trains alone.

    Raises:
        Interrupted: the user asked to stop.
        Exception: whatever the fit raised.
    """
    with none_left(), signals.deferred():
        if trainer.strategy.launcher is None:
            alone(fit, threads)
        else:
            fit()
    signals.stop_if_requested()


def _call(_number: int, function: Callable[[], object], threads: int) -> None:
    torch.set_num_threads(threads)
    function()
