"""What a Trainer has on rank zero when its ranks end, brought to the process that forked them.

There the Trainer goes on as after a run of its own: weights, loops, metrics, the states of callbacks and what the
module saves are taken over at once, optimizers and schedulers when they are first asked for. An attribute that is in no
state_dict, of the module or of a callback, stays in the ranks and is lost with them.
"""

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _determine_lr_attr_name
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.parsing import lightning_setattr
from torch import Tensor, nn

BUILDING = ("configure_model", "setup")  # hooks that may make layers, and run in the ranks
LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")

State = dict[str, Any]


def collected(trainer: Trainer) -> State:
    """What the Trainer has at its end; every rank has to ask, rank zero's is whole."""
    connector, module = trainer._checkpoint_connector, trainer.lightning_module
    state: State = {
        "loops": connector._get_loops_state_dict(),
        "callbacks": call._call_callbacks_state_dict(trainer),
        "metrics": {name: dict(getattr(trainer, name)) for name in METRICS},
        "should_stop": trainer.should_stop,
        "tuned": [callback.optimal_lr for callback in _finders(trainer)],
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


def take_over(trainer: Trainer, state: State) -> None:
    """Have the Trainer know what rank zero's did, but for optimizers and schedulers: see `make_optimizers`.

    Raises:
        ValueError: the module has no place for a weight.
    """
    if state.get("weights") is not None:
        _take_weights(trainer, state)
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


def make_optimizers(trainer: Any, state: State) -> None:
    """Make the fit's optimizers and schedulers by the module's own hooks, and load what rank zero's ended with."""
    module, strategy = trainer.lightning_module, trainer.strategy
    if any(is_overridden(hook, module, LightningModule) for hook in BUILDING) or trainer.datamodule is not None:
        weights = {key: x.clone() if isinstance(x, Tensor) else x for key, x in module.state_dict().items()}
        build(trainer)
        module.load_state_dict(weights, strict=False)
    strategy.optimizers, strategy.lr_scheduler_configs = _init_optimizers_and_lr_schedulers(module)
    for optimizer, values in zip(strategy.optimizers, state["optimizer_states"], strict=True):
        optimizer.load_state_dict(values)
    for config, values in zip(strategy.lr_scheduler_configs, state["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(values)


def build(trainer: Any) -> None:
    """Call the hooks in which a module may make its layers, as a fit does."""
    if trainer.datamodule is not None:
        call._call_lightning_datamodule_hook(trainer, "setup", stage=TrainerFn.FITTING)
    call._call_lightning_module_hook(trainer, "setup", stage=TrainerFn.FITTING)
    with trainer.precision_plugin.module_init_context():
        call._call_lightning_module_hook(trainer, "configure_model")
    trainer.precision_plugin.convert_module(trainer.lightning_module)


def _take_weights(trainer: Trainer, state: State) -> None:
    module, weights = trainer.lightning_module, state["weights"]
    saved = state.get("module") or {}
    builds = any(is_overridden(hook, module, LightningModule) for hook in BUILDING)
    if builds and (saved or _homeless(module, weights)):
        build(trainer)
    if homeless := _homeless(module, weights):
        kind = type(module).__name__
        expected = f"expected layers that are made in {kind}'s constructor, in setup or in configure_model"
        raise ValueError(f"{homeless[0]} was trained in forked ranks, and {kind} here has no such weight: {expected}")
    module.load_state_dict(weights, strict=False)
    if saved:
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", saved)


def _homeless(module: nn.Module, weights: State) -> list[str]:
    return [key for key in weights if key not in module.state_dict()]


def _saves(module: LightningModule) -> bool:
    return is_overridden("on_save_checkpoint", module, LightningModule)


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


def _callbacks(trainer: Any) -> list[Callback]:
    return trainer.callbacks


def _take_learning_rate(trainer: Trainer, callback: LearningRateFinder, found: Any) -> None:
    callback.optimal_lr = found
    rate = found.suggestion() if found is not None and callback._update_attr else None
    if rate is not None:
        module = trainer.lightning_module
        lightning_setattr(module, _determine_lr_attr_name(module, callback._attr_name), rate)
