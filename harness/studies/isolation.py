"""Calls and fits in processes of their own, so that one device's fit is measured under the conditions of a rank."""

import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.multiprocessing.spawn import start_processes

from harness.runs import environment, signals


@contextmanager
def one_thread() -> Iterator[int]:
    """Inside the block torch computes with one thread here; yields the number outside of it.

    OpenMP's threads do not survive a fork: a child that wants several would wait for its parent's.
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
def children_end_with_block(patience: float = 3.0) -> Iterator[None]:
    """When the block raises, processes started in it end too, killed after some seconds.

    A rank inside a collective hears no signal, and this process would wait for it at exit.
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


@contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Inside the block these loggers report errors alone, and warnings are ignored."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def can_fork() -> bool:
    """Whether a process forked from this one can train on any device."""
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


def call_isolated(function: Callable[[], object], threads: int) -> None:
    """Call the function in a forked process with so many threads; where there is no fork, in this one.

    Only what it writes to files outlasts it. More than one thread works only if this process has kept to one.

    Raises:
        Interrupted: the user asked to stop, unless signals are deferred.
    """
    if can_fork():
        process = start_processes(_call, args=(function, threads), nprocs=1, join=False, start_method="fork")
        while not process.join(timeout=0.1):
            if not signals.State.deferring:
                signals.stop_if_requested()  # an exception that a signal raises inside a fork is lost
    else:
        function()


def _call(_number: int, function: Callable[[], object], threads: int) -> None:
    torch.set_num_threads(threads)
    function()


def fit_isolated(trainer: Trainer, fit: Callable[[], object], threads: int) -> None:
    """Fit in processes that end with the fit; a signal ends it at the next batch if it has a `Stoppable`.

    A process that trains alone has so many threads.
    """
    with children_end_with_block(), signals.deferred():
        if trainer.strategy.launcher is None:
            call_isolated(fit, threads)
        else:
            fit()
    signals.stop_if_requested()


class Stoppable(Callback):
    """Ends the fit at the next batch once the user wants to stop: there no rank waits for another."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over signals, now that Lightning has set its handlers."""
        if signals.State.deferring:
            signals.take_over()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Stop if requested."""
        signals.stop_if_requested()
