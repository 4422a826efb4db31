"""Makes Trainers for the cases of a study, and runs fits in processes of their own, as ranks are."""

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder, Timer
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

from apprentice.children import end_with_parent
from apprentice.errors import BadInput
from harness import cli
from harness.runs import environment, signals
from harness.runs.files import write_json
from harness.runs.trainer import MakeTrainer, trainer_factory
from strategies.base import failures
from strategies.base.private import callbacks_of

T = TypeVar("T")
PATIENCE = 3.0  # seconds until a process that should end is killed
TIMEOUT = 300.0  # seconds to wait for a rank that hangs, not the half hour of a run that matters
DURATION = (
    "max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "limit_train_batches", "limit_val_batches",
)  # fmt: skip
DISPLAY = ("enable_model_summary", "enable_progress_bar", "profiler")
EVALUATION = ("val_check_interval", "limit_test_batches")
# Options of the Trainer that do nothing where rows are timed: most are refused by `probe`.
IDLE = (
    *DURATION, *DISPLAY, *EVALUATION, "num_nodes", "num_sanity_val_steps", "check_val_every_n_epoch",
    "log_every_n_steps", "logger",
)  # fmt: skip
CHANGING = EarlyStopping, Timer, LearningRateFinder, BatchSizeFinder  # training or its length
QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0,
    "max_epochs": -1,
}  # fmt: skip


@contextmanager
def one_thread() -> Iterator[int]:
    """Limit torch to one thread, as OpenMP's threads do not survive a fork; yield the number outside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        torch.set_num_threads(threads)


def usual_threads(input_shape: Sequence[int], threads: int) -> int:
    """Return how many of these threads an experiment on one device uses for such images."""
    torch.set_num_threads(threads)  # starts none
    environment.limit_threads(input_shape)
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    return usual


@contextmanager
def children_end_with_block() -> Iterator[None]:
    """Kill processes that the block started if it raises, and they have not ended after `PATIENCE`.

    A rank inside a collective receives no signal, and this process would wait for it at exit.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        started = set(multiprocessing.active_children()) - before
        try:
            deadline = time.monotonic() + PATIENCE
            for process in started:
                process.join(max(deadline - time.monotonic(), 0))
        finally:
            for process in started:
                process.kill()
        raise


def can_fork() -> bool:
    """Return whether a process forked from this one can train on any device."""
    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_initialized()


def run_forked(function: Callable[[int], T], copies: int = 1) -> list[T]:
    """Call a function with each number in processes forked from this one, at the same time; return its results.

    JSON has to hold them. The function can't fork ranks once this process has initialised GPUs.

    Raises:
        ProcessRaisedException: the function raised; its error is the `__cause__`.
    """
    with tempfile.TemporaryDirectory() as folder, children_end_with_block():
        error, results = Path(folder) / "error", [Path(folder) / str(number) for number in range(copies)]

        def call(number: int) -> None:
            end_with_parent()
            with failures.send_errors(error):
                write_json(results[number], function(number))

        try:
            start_processes(call, nprocs=copies, start_method="fork")
        except ProcessRaisedException as failure:
            raise failure from failures.receive(error)[0]
        return [json.loads(result.read_text()) for result in results]


def call_isolated(function: Callable[[], T], threads: int) -> T:
    """Call the function in a fork with so many threads, see `run_forked`; where fork is missing, in this process.

    This process has used one thread alone, see `one_thread`.
    """
    if not can_fork():
        return function()

    def call(_: int) -> T:
        torch.set_num_threads(threads)
        return function()

    return run_forked(call)[0]


def fit_isolated(trainer: Trainer, fit: Callable[[], object], threads: int) -> None:
    """Fit in processes that end with the fit; one device alone uses so many threads. Signals need a `Stoppable`."""
    with children_end_with_block(), signals.defer_signals():
        if trainer.strategy.launcher is None:
            call_isolated(fit, threads)
        else:
            fit()
    signals.stop_if_requested()


class Stoppable(Callback):
    """Ends the fit at the next batch after a signal: there no rank waits for another."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over signals, now that Lightning has set its handlers."""
        if signals.State.deferring:
            signals.take_over()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        signals.stop_if_requested()


def default_devices() -> int | str:
    """Return all GPUs, or two processes where there are none."""
    return "auto" if torch.cuda.is_available() else 2


def with_strategy(trainer: cli.Choice, strategy: Any, exact: int | None = None, one: bool = False) -> MakeTrainer:
    """Return a function that makes Trainers with the user's settings and this strategy.

    `one` takes the first device alone. Forks ranks if the strategy may choose: on GPUs it would start this script
    again in each rank.
    """
    if isinstance(strategy, cli.Choice) and strategy.init_args.get("start_method") == "auto" and can_fork():
        strategy = replace(strategy, init_args=strategy.init_args | {"start_method": "fork"})
    settings = {**trainer.init_args, "strategy": strategy}
    if one:
        devices = settings["devices"]
        settings["devices"] = devices[:1] if isinstance(devices, list) else 1

    def make(**kwargs: Any) -> Trainer:
        return trainer_factory(cli.Choice(trainer.class_path, settings), exact)(**kwargs)

    return make


def probe(choice: cli.Choice, strategy: Any, left_out: Mapping[str, str]) -> Trainer:
    """Make a Trainer with this strategy, to read its devices.

    Raises:
        BadInput: the user sets an option in `left_out`, which says why not, or ranks are not forked here.
    """
    reasons = {
        **left_out,
        **dict.fromkeys(EVALUATION, "rows are trained only"),
        **dict.fromkeys(DISPLAY, "fits that are timed show nothing of it"),
    }
    for key, reason in reasons.items():
        if (value := choice.init_args[key]) not in (None, False, -1):  # it may have no hash
            raise BadInput(f"trainer.{key}", getattr(value, "name", value), f"not allowed, as {reason}")
    trainer = with_strategy(choice, strategy)()
    for callback in callbacks_of(trainer):
        if isinstance(callback, CHANGING):
            expected = "one that changes nothing; all rows are trained alike"
            raise BadInput("trainer.callbacks", type(callback).__name__, expected)
    if trainer.num_nodes > 1:
        raise BadInput("trainer.num_nodes", trainer.num_nodes, "1: one machine is measured")
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None and environment.creates_processes_externally:
        expected = "a start without torchrun or srun: ranks are forked here"
        raise BadInput("trainer.devices", trainer.num_devices, expected)
    return trainer
