"""The state of rank zero's Trainer at its end, brought to the process that forked the ranks.

Weights, loops, metrics, states of callbacks and data module, what the module saves, and where CSVLogger and
TensorBoardLogger write are restored at once, optimizers and schedulers on first access. Attributes in no state_dict of
module, data module or callback are lost with the ranks, and so is the run that another logger has chosen.
"""

import csv
from copy import copy
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.parsing import is_picklable, lightning_setattr
from torch import Tensor

from apprentice.errors import BadInput
from strategies.base.private import Loop, init_optimizers, name_of_lr

LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")

State = dict[str, Any]


def builds_layers(module: LightningModule) -> bool:
    """Whether the module may create layers in the ranks."""
    return any(is_overridden(hook, module, LightningModule) for hook in ("configure_model", "setup"))


def collect(trainer: Any) -> State:
    """Collect the Trainer's state, whole on rank zero; collective."""
    connector, module, data = trainer._checkpoint_connector, trainer.lightning_module, trainer.datamodule
    state: State = {
        "loops": connector._get_loops_state_dict(),
        "callbacks": call._call_callbacks_state_dict(trainer),
        "metrics": {name: dict(getattr(trainer, name)) for name in METRICS},
        "should_stop": trainer.should_stop,
        "learning_rates": [finder.optimal_lr for finder in _learning_rate_finders(trainer)],
        "data": {} if data is None else data.state_dict(),
        "versions": {i: logger._version for i, logger in _loggers(trainer, CSVLogger, TensorBoardLogger)},
        "writers": {i: _picklable(logger._experiment) for i, logger in _loggers(trainer, CSVLogger)},
    }
    weights = module.state_dict()
    if trainer.state.fn == TrainerFn.FITTING:
        saves = is_overridden("on_save_checkpoint", module, LightningModule)
        state |= {
            "weights": weights,
            "module": connector.dump_checkpoint(weights_only=True) if saves else {},
            "precision": trainer.precision_plugin.state_dict(),
            "optimizer_states": [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
    elif trainer.ckpt_path:
        state["weights"] = weights  # loaded in the ranks for this evaluation
    return state


def restore(trainer: Any, state: State, data: LightningDataModule | None) -> None:
    """Restore all but optimizers and schedulers; BadInput if the module here lacks a weight."""
    if state.get("weights") is not None:
        _restore_weights(trainer, state)
    if data is not None and state["data"]:
        _call_data(trainer, data, "setup", stage=trainer.state.fn)  # as Lightning does before it loads
        _call_data(trainer, data, "load_state_dict", state["data"])
    loops: list[Loop] = [getattr(trainer, name) for name in LOOPS]
    for name, loop in zip(LOOPS, loops, strict=True):
        loop.load_state_dict(state["loops"][name])
    while loops:  # and those inside: this is no restart
        loop = loops.pop()
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
        loops += [x for x in vars(loop).values() if isinstance(x, Loop)]
    _restore_callbacks(trainer, state)
    for name in METRICS:
        metrics = getattr(trainer, name)
        metrics.clear()
        metrics.update(state["metrics"][name])
    trainer.should_stop = state["should_stop"]
    if state.get("precision"):
        trainer.precision_plugin.load_state_dict(state["precision"])
    for i, version in state["versions"].items():
        trainer.loggers[i]._version = version
    for i, writer in state["writers"].items():  # a new one would delete the file
        trainer.loggers[i]._experiment = writer


def prepare_logs(trainer: Any) -> None:
    """Let ranks continue the logs of this process, whatever failed ranks have written.

    TensorBoard writes in a thread, which ranks don't have: the next point opens another file.
    """
    for _, logger in _loggers(trainer, TensorBoardLogger):
        if logger._experiment is not None:
            logger._experiment.close()
    for _, logger in _loggers(trainer, CSVLogger):
        writer = logger._experiment
        if isinstance(writer, ExperimentWriter) and writer._fs.isfile(writer.metrics_file_path):
            with writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
                writer.metrics_keys = next(csv.reader(file))


def make_optimizers(trainer: Any, state: State) -> None:
    """Create the fit's optimizers and schedulers by the module's hooks, and load rank zero's states."""
    module, strategy, data = trainer.lightning_module, trainer.strategy, trainer.datamodule
    if builds_layers(module) or data is not None:
        weights = {key: x.clone() if isinstance(x, Tensor) else x for key, x in module.state_dict().items()}
        position = _call_data(trainer, data, "state_dict") if data is not None and state["data"] else {}
        _build(trainer)
        module.load_state_dict(weights, strict=False)
        if position:
            _call_data(trainer, data, "load_state_dict", position)
    strategy.optimizers, strategy.lr_scheduler_configs = init_optimizers(module)
    for optimizer, values in zip(strategy.optimizers, state["optimizer_states"], strict=True):
        optimizer.load_state_dict(values)
    for config, values in zip(strategy.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(values)


def _build(trainer: Any) -> None:
    """Call the hooks in which a module may create its layers, as a fit does."""
    if trainer.datamodule is not None:
        _call_data(trainer, trainer.datamodule, "setup", stage=TrainerFn.FITTING)
    call._call_lightning_module_hook(trainer, "setup", stage=TrainerFn.FITTING)
    with trainer.precision_plugin.module_init_context():
        call._call_lightning_module_hook(trainer, "configure_model")
    trainer.precision_plugin.convert_module(trainer.lightning_module)


def _call_data(trainer: Any, data: LightningDataModule, hook: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the data module, whose `trainer` is set only meanwhile: loaders created here are whole."""
    before, data.trainer = data.trainer, trainer
    try:
        return getattr(data, hook)(*args, **kwargs)
    finally:
        data.trainer = before


def _restore_weights(trainer: Any, state: State) -> None:
    module, weights = trainer.lightning_module, state["weights"]
    saved = state.get("module") or {}
    unknown = _load_weights(module, weights)
    if builds_layers(module) and (saved or unknown):
        _build(trainer)
        unknown = _load_weights(module, weights)
    if unknown:
        kind = type(module).__name__
        expected = f"layers that are made in {kind}'s constructor, in setup or in configure_model"
        raise BadInput("", f"{unknown[0]} was trained in forked ranks, and {kind} here has no such weight", expected)
    if saved:
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", saved)


def _load_weights(module: LightningModule, weights: State) -> list[str]:
    """Load weights, and return the names that the module lacks even after its loading hooks."""
    module.load_state_dict(weights, strict=False)
    names = module.state_dict().keys()
    return [name for name in weights if name not in names]


def _restore_callbacks(trainer: Any, state: State) -> None:
    trainer._callback_connector._attach_model_callbacks()
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint):  # with another folder it would load nothing
            saved = state["callbacks"][callback.state_key]
            callback.dirpath, callback.current_score = saved["dirpath"], saved["current_score"]
    call._call_callbacks_load_state_dict(trainer, state)
    for finder, search in zip(_learning_rate_finders(trainer), state["learning_rates"], strict=True):
        finder.optimal_lr = search
        rate = search.suggestion() if search is not None and finder._update_attr else None
        if rate is not None:
            module = trainer.lightning_module
            lightning_setattr(module, name_of_lr(module, finder._attr_name), rate)


def _learning_rate_finders(trainer: Any) -> list[LearningRateFinder]:
    return [callback for callback in trainer.callbacks if isinstance(callback, LearningRateFinder)]


def _loggers(trainer: Any, *kinds: type[Any]) -> list[tuple[int, Any]]:
    return [(i, logger) for i, logger in enumerate(trainer.loggers) if isinstance(logger, kinds)]


def _picklable(writer: ExperimentWriter | None) -> ExperimentWriter | None:
    """Return a writer without hyperparameters that can't be pickled: the next launch logs the module's again."""
    if not isinstance(writer, ExperimentWriter):  # none, or that of a rank that writes nothing
        return None
    writer = copy(writer)
    writer.hparams = {key: value for key, value in writer.hparams.items() if is_picklable(value)}
    return writer
