"""One fit and test: an interrupted fit resumes from its checkpoint, a finished one is not repeated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.multiprocessing.spawn import ProcessExitedException

from harness.runs import safepoints, signals
from harness.runs.callbacks import drop_unsuited
from harness.runs.files import atomic
from harness.runs.launch import is_main_process
from harness.runs.plans import FitPlan
from harness.runs.progress import Show, Speed
from harness.runs.quiet import quiet
from harness.runs.safepoints import AtomicCheckpointIO, SafePoints, Until
from harness.runs.session import Session
from harness.runs.tensorboard import RunsLogger
from harness.runs.trainer import finish_runs
from lit_modules.learner import Learner
from lit_modules.run_metrics import RunMetrics


@dataclass(frozen=True)
class Fit:
    """The outcome of a fit."""

    seconds: float | None  # of training over all sessions; None if the module was only tested
    epochs: float | None  # after which training ended; None if the module was only tested
    scores: dict[str, float]  # what the test logged; nothing without one
    device: torch.device  # where this process has the module
    autocast: Callable[[], Any]  # makes the context of the Trainer's precision
    samples: dict[str, dict[str, Tensor]]  # of a test, by run and by name, in the main process: `RunMetrics.of_samples`


class SampleWriter(Callback):
    """Writes the values of single samples to a file, as ranks end with a test."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(pl_module, RunMetrics):
            values = pl_module.of_samples()
            if trainer.is_global_zero:
                self.path.parent.mkdir(parents=True, exist_ok=True)  # of a loaded net nothing has been written yet
                with atomic(self.path) as temporary:
                    torch.save(values, temporary)


def fit_and_test(
    run: Session, plan: FitPlan, module: Learner, score: str = "acc", extended: bool = False, show: Show | None = None
) -> Fit:
    """Fit the module, from its checkpoint if there is one, then, if it is to be tested, test its last weights once.

    The module ends with the trained weights in this process, even if the trainer started others.

    Args:
        run: the session, with Trainers, data and loggers.
        plan: what is trained, and how far.
        module: its runs are the plan's arms, or it is one run.
        score: of the validation, by which nets are judged.
        extended: whether a finished fit goes on, as its Trainer has more epochs now.
        show: makes what shows the progress.

    Raises:
        Interrupted: the user asked to stop; the checkpoint has what was trained.
    """
    folder, checkpoint = plan.folder(run.out), plan.checkpoint(run.out)
    loggers = run.loggers(f"{folder.name}/{plan.name}")
    state = safepoints.read(checkpoint) if checkpoint.exists() else None
    if state is not None:
        safepoints.load(module, state, checkpoint)  # before ranks are started, one of which would fail alone

    def trainer(purge_step: int = 0, part: str = "", **kwargs: Any) -> Trainer:
        runs = [arm.name for arm in plan.arms]
        curves = [RunsLogger(folder, runs, plan.name, purge_step, part, score)] if run.tensorboard else []
        kwargs |= {**plan.trainer, "logger": [*curves, *loggers] or False, "plugins": [AtomicCheckpointIO()]}
        return run.trainer(**kwargs, **({"show": show} if show else {}))

    with quiet():
        if not plan.is_trained and (extended or not (state and state["callbacks"]["SafePoints"]["finished"])):
            with _stop_after_save():
                callbacks = [SafePoints(checkpoint, run.config.checkpoint_every), Speed()]
                callbacks += [] if plan.until is None else [Until(plan.until)]
                epochs: dict[str, Any] = {} if plan.epochs is None else {"max_epochs": plan.epochs}
                purge_step = state["global_step"] if state else 0
                fitting = trainer(purge_step, enable_checkpointing=True, callbacks=callbacks, **epochs)
                drop_unsuited(run, plan.label, module, fitting)
                for callback in fitting.checkpoint_callbacks:  # the user's, unless placed elsewhere
                    if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                        callback.dirpath = str(folder / "checkpoints" / plan.name)
                resumed: dict[str, Any] = {"ckpt_path": str(checkpoint), "weights_only": True} if state else {}
                fitting.fit(module, run.data, **resumed)
            state = safepoints.read(checkpoint)
        if state is not None:
            safepoints.load(module, state, checkpoint)
        path = checkpoint.with_suffix(".samples")
        only_test: dict[str, Any] = {"enable_checkpointing": False, "enable_model_summary": False, "profiler": None}
        testing = trainer(part=".test", callbacks=[SampleWriter(path)], **only_test)
        scores = dict(testing.test(module, run.data, verbose=False)[0]) if plan.tested else {}
        testing.strategy.barrier()
        finish_runs(loggers)
    samples: dict[str, dict[str, Tensor]] = {}
    if is_main_process() and path.exists():
        samples = torch.load(path)
        path.unlink()
    points = state["callbacks"]["SafePoints"] if state else {"seconds": None, "epochs": None}
    device, forward = testing.strategy.root_device, testing.strategy.precision_plugin.forward_context
    return Fit(points["seconds"], points["epochs"], scores, device, forward, samples)


@contextmanager
def _stop_after_save() -> Iterator[None]:
    """Defer signals during a fit; raise Interrupted if it ended on account of one, in one process or many."""
    try:
        with signals.defer_signals():
            yield
    except (SystemExit, ProcessExitedException) as stop:
        if isinstance(stop, ProcessExitedException) or stop.code == signals.SAVED:
            signals.stop_if_requested()
        raise
    signals.stop_if_requested()
