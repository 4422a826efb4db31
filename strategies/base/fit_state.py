"""What a Trainer has on rank zero when its ranks end, brought to the process that forked them.

Weights, loops, metrics, the states of callbacks and of the data module, what the module saves, and where CSVLogger and
TensorBoardLogger write are taken over at once, optimizers and schedulers when they are first asked for. An attribute
that is in no state_dict, of the module, the data module or a callback, stays in the ranks and is lost with them, as
does the run that another logger has chosen.
"""

import csv
from collections.abc import Iterator
from copy import copy
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.parsing import is_picklable, lightning_setattr
from torch import Tensor

BUILDING = ("configure_model", "setup")  # hooks that may make layers, and run in the ranks
LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")

State = dict[str, Any]


def collected(trainer: Trainer) -> State:
    """What the Trainer has at its end; every rank has to ask, rank zero's is whole."""
    connector, module, data = trainer._checkpoint_connector, trainer.lightning_module, _data(trainer)
    state: State = {
        "loops": connector._get_loops_state_dict(),
        "callbacks": call._call_callbacks_state_dict(trainer),
        "metrics": {name: dict(getattr(trainer, name)) for name in METRICS},
        "should_stop": trainer.should_stop,
        "tuned": [callback.optimal_lr for callback in _finders(trainer)],
        "data": {} if data is None else data.state_dict(),
        "versions": {i: logger._version for i, logger in _writing(trainer, CSVLogger, TensorBoardLogger)},
        "writers": {i: _picklable(logger._experiment) for i, logger in _writing(trainer, CSVLogger)},
    }
    weights = module.state_dict()
    if trainer.state.fn == TrainerFn.FITTING:
        plugin = trainer.precision_plugin
        state |= {
            "weights": weights,
            "module": connector.dump_checkpoint(weights_only=True) if _saves(module) else {},
            "precision": plugin.state_dict(),
            "optimizer_states": [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }
    elif trainer.ckpt_path:
        state["weights"] = weights  # what was evaluated was loaded in the ranks
    return state


def take_over(trainer: Trainer, state: State, data: LightningDataModule | None) -> None:
    """Have Trainer, module and data know what rank zero's did, but for optimizers and schedulers: `make_optimizers`.

    Raises:
        ValueError: the module has no place for a weight.
    """
    if state.get("weights") is not None:
        _take_weights(trainer, state)
    if data is not None and state["data"]:
        _call_data(trainer, data, "setup", stage=trainer.state.fn)  # as before a resume loads
        _call_data(trainer, data, "load_state_dict", state["data"])
    for name in LOOPS:
        _load(getattr(trainer, name), state["loops"][name])
    trainer._callback_connector._attach_model_callbacks()
    for callback in _callbacks(trainer):
        if isinstance(callback, ModelCheckpoint):  # it would take over nothing from the folder that a rank has chosen
            saved = state["callbacks"][callback.state_key]
            callback.dirpath, callback.current_score = saved["dirpath"], saved["current_score"]
    call._call_callbacks_load_state_dict(trainer, state)
    for name in METRICS:
        metrics = getattr(trainer, name)
        metrics.clear()
        metrics.update(state["metrics"][name])
    trainer.should_stop = state["should_stop"]
    for callback, found in zip(_finders(trainer), state["tuned"], strict=True):
        _take_learning_rate(trainer, callback, found)
    if state.get("precision"):
        trainer.precision_plugin.load_state_dict(state["precision"])
    for i, version in state["versions"].items():
        trainer.loggers[i]._version = version
    for i, writer in state["writers"].items():  # a new one would delete what that one has written
        trainer.loggers[i]._experiment = writer


def prepare_logs(trainer: Trainer) -> None:
    """Have ranks go on with the logs of this process, whatever ranks that failed have written.

    What TensorBoard writes goes through a thread, which ranks don't have: the next point opens another file.
    """
    for _, logger in _writing(trainer, TensorBoardLogger):
        if logger._experiment is not None:
            logger._experiment.close()
    for _, logger in _writing(trainer, CSVLogger):
        writer = logger._experiment
        if isinstance(writer, ExperimentWriter) and writer._fs.isfile(writer.metrics_file_path):
            with writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
                writer.metrics_keys = next(csv.reader(file))


def make_optimizers(trainer: Any, state: State) -> None:
    """Make the fit's optimizers and schedulers by the module's own hooks, and load what rank zero's ended with."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if any(is_overridden(hook, module, LightningModule) for hook in BUILDING) or trainer.datamodule is not None:
        weights = {key: x.clone() if isinstance(x, Tensor) else x for key, x in module.state_dict().items()}
        data = _data(trainer)
        position = {} if data is None else _call_data(trainer, data, "state_dict") if state["data"] else {}
        build(trainer)
        module.load_state_dict(weights, strict=False)
        if data is not None and position:
            _call_data(trainer, data, "load_state_dict", position)
    strategy.optimizers, strategy.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
    for optimizer, values in zip(strategy.optimizers, state["optimizer_states"], strict=True):
        optimizer.load_state_dict(values)
    for config, values in zip(strategy.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(values)


def build(trainer: Any) -> None:
    """Call the hooks in which a module may make its layers, as a fit does."""
    data = _data(trainer)
    if data is not None:
        _call_data(trainer, data, "setup", stage=TrainerFn.FITTING)
    call._call_lightning_module_hook(trainer, "setup", stage=TrainerFn.FITTING)
    with trainer.precision_plugin.module_init_context():
        call._call_lightning_module_hook(trainer, "configure_model")
    trainer.precision_plugin.convert_module(trainer.lightning_module)


def _call_data(trainer: Any, data: LightningDataModule, hook: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the data module, which knows the Trainer then; else loaders that are asked for here are whole."""
    before, data.trainer = data.trainer, trainer
    try:
        return getattr(data, hook)(*args, **kwargs)
    finally:
        data.trainer = before


def _take_weights(trainer: Trainer, state: State) -> None:
    module, weights = trainer.lightning_module, state["weights"]
    saved = state.get("module") or {}
    builds = any(is_overridden(hook, module, LightningModule) for hook in BUILDING)
    homeless = _load_weights(module, weights)
    if builds and (saved or homeless):
        build(trainer)
        homeless = _load_weights(module, weights)
    if homeless:
        kind = type(module).__name__
        expected = f"expected layers that are made in {kind}'s constructor, in setup or in configure_model"
        raise ValueError(f"{homeless[0]} was trained in forked ranks, and {kind} here has no such weight: {expected}")
    if saved:
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", saved)


def _load_weights(module: LightningModule, weights: State) -> list[str]:
    """Load them, and return the names of those that the module has no place for, also after its own loading hooks."""
    module.load_state_dict(weights, strict=False)
    here = module.state_dict()
    return [key for key in weights if key not in here]


def _saves(module: LightningModule) -> bool:
    return is_overridden("on_save_checkpoint", module, LightningModule)


def _writing(trainer: Trainer, *kinds: type[Any]) -> list[tuple[int, Any]]:
    return [(i, logger) for i, logger in enumerate(trainer.loggers) if isinstance(logger, kinds)]


def _picklable(writer: ExperimentWriter | None) -> ExperimentWriter | None:
    """A writer without hyperparameters that can't be sent: those of the module are logged anew by the next launch."""
    if not isinstance(writer, ExperimentWriter):  # none, or that of a rank that writes nothing
        return None
    writer = copy(writer)
    writer.hparams = {key: value for key, value in writer.hparams.items() if is_picklable(value)}
    return writer


def _load(loop: _Loop, state: State) -> None:
    """Bring a loop where rank zero's is; that is no restart."""
    loop.load_state_dict(state)
    for inner in _loops(loop):
        inner._restarting = inner._loaded_from_state_dict = inner._resuming_from_checkpoint = False


def _loops(loop: _Loop) -> Iterator[_Loop]:
    yield loop
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            yield from _loops(inner)


def _finders(trainer: Trainer) -> list[LearningRateFinder]:
    return [callback for callback in _callbacks(trainer) if isinstance(callback, LearningRateFinder)]


def _data(trainer: Any) -> LightningDataModule | None:
    return trainer.datamodule


def _callbacks(trainer: Any) -> list[Callback]:
    return trainer.callbacks


def _take_learning_rate(trainer: Trainer, callback: LearningRateFinder, found: Any) -> None:
    callback.optimal_lr = found
    rate = found.suggestion() if found is not None and callback._update_attr else None
    if rate is not None:
        module = trainer.lightning_module
        lightning_setattr(module, _determine_lr_attr_name(module, callback._attr_name), rate)
