"""One fit and test: an interrupted fit resumes from its checkpoint, a finished one is not repeated."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.multiprocessing import ProcessExitedException

from harness.runs import safepoints, signals
from harness.runs.files import atomic
from harness.runs.launch import is_main_process
from harness.runs.loggers import end
from harness.runs.progress import Show
from harness.runs.quiet import quiet
from harness.runs.safepoints import AtomicCheckpointIO, SafePoints, Until
from harness.runs.speed import Speed
from harness.runs.tensorboard import RunsLogger
from lit_modules.run_metrics import RunMetrics

# With the user's settings; takes callbacks, logger and plugins by keyword, and `show` as `trainers` has it.
MakeTrainer = Callable[..., Trainer]


@dataclass(frozen=True)
class Fit:
    """The outcome of a fit."""

    seconds: float | None  # of training over all sessions; None if the module was only tested
    epochs: float | None  # after which training ended; None if the module was only tested
    scores: dict[str, float]  # what the test logged; nothing without one
    device: torch.device  # where this process has the module
    autocast: Callable[[], Any]  # makes the context of the Trainer's precision
    samples: dict[str, dict[str, Tensor]]  # of a test, by run and by name, in the main process: `RunMetrics.of_samples`


class Tested(Callback):
    """Writes the values of single samples to a file, as ranks end with a test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gather them from all ranks."""
        if isinstance(pl_module, RunMetrics):
            found = pl_module.of_samples()
            if trainer.is_global_zero:
                self.path.parent.mkdir(parents=True, exist_ok=True)  # of a loaded net nothing has been written yet
                with atomic(self.path) as temporary:
                    torch.save(found, temporary)


def fit_and_test(
    module: LightningModule,
    data: LightningDataModule,
    make_trainer: MakeTrainer,
    checkpoint: Path,  # the fit's file, in the folder of the runs
    *,
    runs: list[str],  # names of the module's TensorBoard runs; what they share is that of the checkpoint's name
    score: str = "acc",  # of the validation, by which nets are judged
    every: float = 30.0,  # seconds between checkpoints
    tensorboard: bool = True,  # whether to write TensorBoard's files
    show: Show | None = None,  # what shows the progress
    trained: bool = False,  # whether the module has its weights already and is only tested
    extended: bool = False,  # whether a finished fit goes on, as its Trainer has more epochs now
    more: Sequence[Logger] = (),  # loggers beside TensorBoard's
    suited: Callable[[Trainer], None] = lambda _: None,  # takes from a fit's Trainer what does not suit the module
    until: int | None = None,  # the epoch after which it ends, under the schedule of all epochs
    tested: bool = True,
) -> Fit:
    """Fit the module, from its checkpoint if there is one, then, if it is to be `tested`, test its last weights once.

    The module ends with the trained weights in this process, even if the trainer started others.

    Raises:
        Interrupted: the user asked to stop; the checkpoint has what was trained.
    """
    state = safepoints.read(checkpoint) if checkpoint.exists() else None
    if state is not None:
        safepoints.load(module, state, checkpoint)  # before ranks are started, one of which would fail alone

    def trainer(purge_step: int = 0, part: str = "", **kwargs: Any) -> Trainer:
        logger = RunsLogger(checkpoint.parent, runs, checkpoint.stem, purge_step, part, score)
        kwargs |= {"show": show} if show else {}
        loggers = [*([logger] if tensorboard else []), *more]
        return make_trainer(logger=loggers or False, plugins=[AtomicCheckpointIO()], **kwargs)

    with quiet():
        if not trained and (extended or not (state and state["callbacks"]["SafePoints"]["finished"])):
            with _stop_after_save():
                purge_step = state["global_step"] if state else 0
                resumed: dict[str, Any] = {"ckpt_path": str(checkpoint), "weights_only": True} if state else {}
                own = [SafePoints(checkpoint, every), Speed(), *([] if until is None else [Until(until)])]
                fitting = trainer(purge_step, enable_checkpointing=True, callbacks=own)
                suited(fitting)
                _place_checkpoints(fitting, checkpoint)
                fitting.fit(module, data, **resumed)
            state = safepoints.read(checkpoint)
        if state is not None:
            safepoints.load(module, state, checkpoint)
        only_test: dict[str, Any] = {"enable_checkpointing": False, "enable_model_summary": False, "profiler": None}
        path = checkpoint.with_suffix(".samples")
        testing = trainer(part=".test", callbacks=[Tested(path)], **only_test)
        scores = dict(testing.test(module, data, verbose=False)[0]) if tested else {}
        testing.strategy.barrier()
        end(more)
    samples: dict[str, dict[str, Tensor]] = {}
    if is_main_process() and path.exists():
        samples = torch.load(path)
        path.unlink()
    of_fit = state["callbacks"]["SafePoints"] if state else {}
    device, forward = testing.strategy.root_device, testing.strategy.precision_plugin.forward_context
    return Fit(of_fit.get("seconds"), of_fit.get("epochs"), scores, device, forward, samples)


def _place_checkpoints(trainer: Trainer, checkpoint: Path) -> None:
    """Let Lightning's ModelCheckpoint write into the run's folder, unless the user has named another."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(checkpoint.parent / "checkpoints" / checkpoint.stem)


@contextmanager
def _stop_after_save() -> Iterator[None]:
    """Defer signals during a fit; raise Interrupted if it ended on account of one, in one process or many."""
    try:
        with signals.deferred():
            yield
    except (SystemExit, ProcessExitedException) as stop:
        if getattr(stop, "code", signals.SAVED) == signals.SAVED:
            signals.stop_if_requested()
        raise
    signals.stop_if_requested()
