"""One fit in a run's folder: it goes on where it was cut off, and is never done twice."""

from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch.multiprocessing import ProcessExitedException

from harness.runs import safepoints, signals
from harness.runs.safepoints import AtomicCheckpointIO, SafePoints
from harness.runs.progress import progress, quiet
from harness.runs.tensorboard import RunsLogger

MakeTrainer = Callable[..., Trainer]


class Fitted:
    """What a fit ended with.

    Attributes:
        seconds: of training, all sessions together; None if there was none.
        scores: what the test logged.
        device: where this process trained.
        autocast: the precision in which it did, a context.
    """

    def __init__(self, seconds: float | None, scores: dict[str, float], strategy: Strategy) -> None:
        self.seconds, self.scores = seconds, scores
        self.device, self.autocast = strategy.root_device, strategy.precision_plugin.forward_context


def fit_and_test(
    module: LightningModule,
    data: LightningDataModule,
    make_trainer: MakeTrainer,
    checkpoint: Path,
    *,
    runs: list[str],
    every: float = 30.0,
    tensorboard: bool = True,
    label: str = "",
    trained: bool = False,
) -> Fitted:
    """Fit the module from its checkpoint if there is one, then test its last weights once.

    The module ends with the trained weights in this process, whatever processes the trainer started.

    Args:
        module: what to train.
        data: what on.
        make_trainer: Trainer with the user's settings; takes callbacks, logger and plugins by keyword.
        checkpoint: the file in which the fit is kept, in the folder of the runs.
        runs: names of the module's runs, for TensorBoard; the first is the default.
        every: seconds between checkpoints.
        tensorboard: whether to write TensorBoard's files.
        label: begins each line of progress.
        trained: the module's weights are there already: only test it.

    Raises:
        Interrupted: the user asked to stop; what was trained is in the checkpoint.
    """
    state = safepoints.read(checkpoint) if checkpoint.exists() else None

    def trainer(purge_step: int = 0, part: str = "", **kwargs: Any) -> Trainer:
        logger = RunsLogger(checkpoint.parent, runs, runs[0], purge_step, part)
        return make_trainer(logger=logger if tensorboard else False, plugins=[AtomicCheckpointIO()], **kwargs)

    with quiet():
        if not trained and (state is None or not _progress(state)["finished"]):
            with _stopping_after_save():
                resumed: dict[str, Any] = {"ckpt_path": str(checkpoint), "weights_only": True} if state else {}
                shown = progress(label)
                callbacks = [SafePoints(checkpoint, every), *shown.pop("callbacks")]
                purge_step = state["global_step"] if state else 0
                fitting = trainer(purge_step, callbacks=callbacks, enable_checkpointing=True, **shown)
                fitting.fit(module, data, **resumed)
            state = safepoints.read(checkpoint)
        if state is not None:
            module.load_state_dict(state["state_dict"])
            module.on_load_checkpoint(state)
        testing = trainer(part=".test", callbacks=[], enable_checkpointing=False, enable_progress_bar=False)
        scores = testing.test(module, data, verbose=False)[0]
        testing.strategy.barrier()
    return Fitted(_progress(state)["seconds"] if state else None, dict(scores), testing.strategy)


def _progress(state: dict[str, Any]) -> dict[str, Any]:
    return state["callbacks"]["SafePoints"]


@contextmanager
def _stopping_after_save() -> Any:
    """Signals are noted while a fit runs; its end on account of one is `Interrupted`, in one process or many."""
    try:
        with signals.deferred():
            yield
    except SystemExit as stop:
        if stop.code != signals.SAVED:
            raise
        signals.stop_if_requested()
        raise
    except ProcessExitedException:
        signals.stop_if_requested()
        raise
    signals.stop_if_requested()
