"""A fit that fails: hooks run in the ranks that have trained, and ranks that stopped responding are named."""

import contextlib
import os
import pickle
import re
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessRaisedException

from apprentice.errors import BadInput
from strategies.base.private import SubprocessScriptLauncher, abort_process_group, callbacks_of, default_store
from strategies.base.ranks import RankStrategy
from strategies.base.rendezvous import RankTimeoutError

PATIENCE = 5.0  # seconds until a rank has failed alone
STOP = "should_stop"
RESPONSE_TIME = 3.0  # seconds in which a rank that is there responds; a launcher ends us sooner after a rank's death
# "timeout caused": gloo closed a connection because another operation timed out
SIGNS = re.compile("[Tt]imed out|timeout caused|Connection (closed|reset)|Broken pipe|Watchdog|connectFullMesh")


def may_save(trainer: Trainer) -> bool:
    """Whether a callback has an `on_exception`, which may save a checkpoint."""
    hooks = [callback for callback in callbacks_of(trainer) if type(callback).on_exception is not Callback.on_exception]
    return any(callback.save_on_exception if isinstance(callback, ModelCheckpoint) else True for callback in hooks)


def is_everywhere(trainer: Trainer, exception: BaseException) -> bool:
    """Whether all ranks have failed in the same line of the same step, and so can go on communicating; collective."""
    if isinstance(exception, KeyboardInterrupt) or SIGNS.search(str(exception)):
        return False
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(exception.__traceback__)]
    place = repr((type(exception).__name__, trainer.global_step, lines))
    responses = exchange("failed", place, PATIENCE) or {}
    return [*responses.values()] == [place] * dist.get_world_size()


@contextlib.contextmanager
def send_errors(file: Path) -> Iterator[None]:
    """Pickle the block's error, its traceback as text and the rank's process, for the one that forked it."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # not every error can be pickled, and the disk may be full
            sent: Exception = error
            if isinstance(error, BadInput):  # its value may be a function, or a mesh
                sent = type(error)(error.argument, str(error.value), error.expected)
            file.write_bytes(pickle.dumps((sent, traceback.format_exc(), os.getpid())))
        raise


def receive(file: Path) -> tuple[Exception | None, str, int]:
    """Return the error that a rank has sent, its traceback and process; None where it sent none that is read here."""
    with contextlib.suppress(Exception):
        error, text, process = pickle.loads(file.read_bytes())
        return error, text, process
    return None, "", 0


def first_cause(
    failure: ProcessRaisedException, files: Sequence[Path]
) -> tuple[ProcessRaisedException, Exception | None]:
    """Return the failure to report, and its error, from the files of all ranks.

    It is that of the rank that ended first. Where this only says that another has gone or has kept it waiting, and the
    other, which was still saving, has sent why: the other's.
    """
    error = receive(files[failure.error_index])[0]
    if isinstance(error, ConnectionError | TimeoutError):
        for rank, file in enumerate(files):
            other, text, process = receive(file)
            if other and not isinstance(other, ConnectionError | TimeoutError):
                message = f"\n\n-- Process {rank} terminated with the following error:\n{text}"
                return ProcessRaisedException(message, rank, process), other
    return failure, error


def saves_alone(strategy: RankStrategy, trainer: Trainer) -> bool:
    """Whether this rank saves a checkpoint of a failed fit, whatever has become of the others."""
    has_state = strategy.is_global_zero and (strategy.saves_alone or strategy.world_size == 1)
    return has_state and trainer.state.fn == TrainerFn.FITTING and may_save(trainer)


def prepare_hooks(strategy: RankStrategy, trainer: Trainer, exception: BaseException, ends: bool) -> None:
    """Before Lightning calls `on_exception`: let a rank save by itself, or with all others, or not at all.

    A rank that does not end now may fit again, with the others.
    """
    if not dist.is_initialized() or strategy.world_size == 1 or not may_save(trainer):
        return
    if not (ends and strategy.saves_alone) and is_everywhere(trainer, exception):
        return
    if not strategy.saves_alone:
        set_hooks_aside(strategy, trainer, "callbacks")
        kind = type(strategy).__name__
        exception.add_note(f"on_exception of callbacks was not called: {kind} saves with all ranks or not at all")
        return
    try:
        raise_for_missing(strategy, exception)
    except (TimeoutError, ConnectionError, ValueError, SystemExit) as missing:
        strategy.missing = missing
    # Outside of the process group, metrics and checkpoints wait for nobody.
    abort_process_group() if dist.get_backend() == "nccl" else dist.destroy_process_group()


def set_hooks_aside(strategy: RankStrategy, trainer: Any, *names: str) -> None:
    """Take what Lightning would call from the Trainer's attributes, until the strategy's teardown."""
    for name in names:
        strategy.undo.callback(setattr, trainer, name, getattr(trainer, name))
        setattr(trainer, name, None if name == "datamodule" else [])


def raise_for_missing(strategy: RankStrategy, exception: BaseException) -> None:
    """Raise an error that names the ranks that don't respond, if `exception` came from a collective.

    RankTimeoutError: they did not come within the strategy's timeout; ConnectionError: they have gone; BadInput: all
    respond, and some have left the training loop; SystemExit in a sub-process: another rank reports that, as all write
    to one terminal.
    """
    text = str(exception)
    collective = isinstance(exception, RuntimeError) and SIGNS.search(text)
    if not collective or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    trainer = strategy.lightning_module and strategy.lightning_module._trainer  # none in the process that forked
    responses = exchange("present", STOP if trainer and trainer.should_stop else "", RESPONSE_TIME)
    # Rank 0 serves the store.
    missing = [0] if responses is None else [rank for rank in range(dist.get_world_size()) if rank not in responses]
    if responses is not None and not missing:
        stopped = [rank for rank, value in responses.items() if value == STOP]
        if 0 < len(stopped) < dist.get_world_size():  # the others wait in the loop
            expected = "it on all ranks after the same step, or on none"
            raise BadInput("", "trainer.should_stop", f"{expected}; it is set on {_name_ranks(stopped)} alone")
        return
    is_script = isinstance(strategy._launcher, SubprocessScriptLauncher)
    if is_script and any(rank not in missing for rank in range(dist.get_rank())):
        raise SystemExit(2)
    names = _name_ranks(missing)
    if "imed out" in text or "timeout" in text:
        expected = f"every rank to come within that time; {names} kept the others waiting"
        raise RankTimeoutError("timeout", f"{strategy._timeout_seconds:g}", expected)
    has, its = ("has", "its") if len(missing) == 1 else ("have", "their")
    raise ConnectionError(f"{names} {has} gone; {its} own message, if there is one, is above") from exception


def _name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def leave_stopped() -> None:
    """Let ranks that still train learn from `raise_for_missing` that this one has ended by `should_stop`."""
    if dist.is_initialized():
        default_store().set(f"present/{dist.get_rank()}", STOP)


def exchange(key: str, value: str, seconds: float) -> dict[int, str] | None:
    """Return the values of the ranks that call this within so many seconds; None if the store does not answer."""
    result: list[dict[int, str]] = []

    def ask() -> None:
        store, deadline, responses = default_store(), time.monotonic() + seconds, dict[int, str]()
        with contextlib.suppress(dist.DistNetworkError):  # the store has gone, and rank 0 with it
            store.set(f"{key}/{dist.get_rank()}", value)
            while len(responses) < dist.get_world_size() and time.monotonic() < deadline:
                absent = [rank for rank in range(dist.get_world_size()) if rank not in responses]
                arrived = [rank for rank in absent if store.check([f"{key}/{rank}"])]
                responses |= {rank: store.get(f"{key}/{rank}").decode() for rank in arrived}
                time.sleep(0.05)
            result.append(dict(sorted(responses.items())))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds + 2)
    return result[0] if result else None
