"""The strategies, optimizers and schedulers to choose from, and checks of values that Lightning and torch accept."""

import math
import warnings
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, callbacks, loggers, strategies
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import nn
from torch.optim import lr_scheduler

from apprentice.errors import BadInput
from harness.cli.classes import Choice, Chosen, Classes, factory, refusals
from harness.cli.messages import near
from harness.cli.signatures import options_of
from lit_modules.schedules import CosineWarmup, MakeScheduler, build_scheduler, nominal
from strategies import NAMES

OWNED = {  # arguments of the Trainer that the experiment sets, and what to do instead
    "barebones": "not allowed, as a run has curves and checkpoints; --trainer.logger false writes fewer files",
    "default_root_dir": "--out FOLDER in its place",
    "enable_autolog_hparams": "not allowed, as loggers always have the hyperparameters",
    "enable_checkpointing": "not allowed, as a run keeps its own checkpoints; --checkpoint_every SECONDS says when",
    "fast_dev_run": "--trainer.max_epochs 1 --trainer.limit_train_batches 1, and 1 for limit_val_batches and "
    "limit_test_batches, in its place: it would leave no table",
    "inference_mode": "not allowed, as nets are always tested in inference mode",
    "limit_predict_batches": "--trainer.limit_test_batches, whose predictions the run keeps",
    "model_registry": "not allowed, as a run writes into --out FOLDER alone",
    "overfit_batches": "--data.train_size N in its place: the same N samples in each epoch",
    "reload_dataloaders_every_n_epochs": "not allowed, as one loader serves all epochs, each in its own order",
    "sync_batchnorm": "not allowed, as BatchNorm has the global batch's statistics anyway, a shard's with --exact",
    "use_distributed_sampler": "not allowed, as the data module deals samples to ranks",
}
# Arguments of strategies that the Trainer passes, that are objects, or that have a flag of their own.
NOT_OPTIONS = frozenset({
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "ddp_comm_state",
    "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "exact",
})  # fmt: skip
AT_LEAST = {
    "accumulate_grad_batches": 1, "check_val_every_n_epoch": 1, "gradient_clip_val": 0, "limit_val_batches": 0,
    "log_every_n_steps": 0, "min_epochs": 0, "min_steps": 0, "num_sanity_val_steps": -1,
}  # fmt: skip
ABOVE_ZERO = ("limit_train_batches", "limit_test_batches", "val_check_interval")
FRACTIONS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "val_check_interval")
# In place of the Trainer's own.
TYPES = {"logger": bool | Logger | list[Logger], "devices": int | list[int] | str}
# With these options no result changes, and a resumed run may have others.
ANY_ON_RESUME = (
    "devices", "strategy", "accelerator", "num_nodes", "logger", "log_every_n_steps", "enable_progress_bar",
    "enable_model_summary", "profiler",
)  # fmt: skip
TRIED_EPOCHS = 1000

# Any optimizer that steps each student by itself, and any scheduler that depends on the epoch alone.
OPTIMIZERS = Classes((torch.optim.Optimizer,), torch.optim, frozenset({"params"}), {
    torch.optim.LBFGS: "one that steps each student by itself, such as Adam or SGD; this one couples students",
    torch.optim.SparseAdam: "one for dense gradients, such as Adam",
})  # fmt: skip
SCHEDULERS = Classes((lr_scheduler.LRScheduler,), lr_scheduler, frozenset({"optimizer", "last_epoch"}), {
    lr_scheduler.ReduceLROnPlateau:
        "one that depends on the epoch alone, such as MultiStepLR; this one couples students",
}, more=(CosineWarmup,))  # fmt: skip
# By how their flags end, with what the help says.
RATES = {"optimizer": (OPTIMIZERS, "how weights are updated"), "scheduler": (SCHEDULERS, "of the learning rate")}
CALLBACKS = Classes((Callback,), callbacks)
LOGGERS = Classes((Logger,), loggers, is_switch=True)  # beside TensorBoard's, which true and false switch


@dataclass(frozen=True)
class Strategies(Classes):
    """What `--trainer.strategy` chooses from; names that only Lightning looks up stay text."""

    bases: tuple[type, ...] = (Strategy,)
    package: ModuleType = strategies
    skip: frozenset[str] = NOT_OPTIONS
    names: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=lambda: NAMES)  # the project's own

    @property
    def by_name(self) -> dict[str, type]:
        """`auto`, and the project's short names, each with the base: a class is imported when it is chosen."""
        return dict.fromkeys(["auto", *self.names], Strategy)

    def get(self, name: str) -> type | None:
        return self.by_name.get(name)

    def find(self, name: Any, key: str) -> tuple[type | str | bool | None, Mapping[str, Any]]:
        """Return the class of this name and the options that the name sets; Lightning's names as they are."""
        if name in list(self.names):
            path, sets = self.names[name]
            return resolve_name(path), sets
        if name == "dp":
            raise BadInput(key, name, "ddp, one process a GPU; dp, one process for all, was slower, and is gone")
        return (name, {}) if name in ["auto", *StrategyRegistry.available_strategies()] else super().find(name, key)

    def choose(self, name: str) -> Choice:
        """Return the class of one of the project's names, with its options by default."""
        path, sets = self.names[name]
        return Choice(path, {**options_of(resolve_name(path), self.skip).defaults, **sets})

    def is_same(self, name: Any, old: Any, options: Mapping[str, Any]) -> bool:
        """Return whether a name stands for an old one, or for the class and options that were given for it."""
        return name in (old, self.label(Choice(str(old), dict(options))))

    def path(self, chosen: type, name: str) -> str:
        """Return the class path to write down, the same for all paths of a class of ours."""
        same_name = (path for path, _ in self.names.values() if path.endswith(f".{chosen.__name__}"))
        return next((path for path in same_name if resolve_name(path) is chosen), name)

    def expected(self, name: Any = "") -> str:
        """Return all short names, for a message, and those near to `name`, Lightning's too."""
        close = near(name, [*self.by_name, *StrategyRegistry.available_strategies()])
        return f"{', '.join(self.by_name)} or the import path of a class{close}"

    def label(self, chosen: Chosen) -> str:
        """Return the short name that stands for most of a choice, or its import path."""
        if not isinstance(chosen, Choice):
            return str(chosen)
        options = {name: sets for name, (path, sets) in self.names.items() if path == chosen.class_path}
        fitting = [name for name, sets in options.items() if sets.items() <= chosen.init_args.items()]
        return max(fitting, key=lambda name: len(options[name]), default=chosen.class_path)

    def exact(self, chosen: Chosen) -> bool:
        """Return whether a choice can have `--exact`: its class takes it."""
        target = chosen.target if isinstance(chosen, Choice) else Strategy
        return "exact" in options_of(target).hints


def scheduler_factory(choice: Choice, key: str) -> MakeScheduler:
    """Bind a scheduler's options; the schedulers that it is made of wait for the optimizer, as it does."""
    parts = {
        name: [scheduler_factory(part, f"{key}.{name}.{place}") for place, part in enumerate(value)]
        for name, value in choice.init_args.items()
        if isinstance(value, list) and any(isinstance(part, Choice) for part in value)
    }
    others = {name: value for name, value in choice.init_args.items() if name not in parts}
    return partial(factory(replace(choice, init_args=others), key), **parts)


def check_optimizer(config: Namespace, steps_flag: str, rates_flag: str, epochs: int) -> None:
    """Make a dummy net's optimizer, and a few epochs' changes of its rate; BadInput if that fails or is not finite.

    The flags are those of the optimizer and the scheduler.
    """
    optimizer, scheduler = vars(config)[steps_flag], vars(config)[rates_flag]
    if optimizer.init_args.get("lr") == 0:
        raise BadInput(f"{steps_flag}.lr", 0, "a number above 0; with this one nothing is trained")
    _refuse_infinite(optimizer, steps_flag, "options with which a step gives finite weights")
    net = nn.Linear(2, 2, bias=False)  # of two dimensions, which Muon needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with refusals(optimizer, steps_flag):
            steps = factory(optimizer, steps_flag)(net.parameters())
        if scheduler is None:
            return
        with refusals(scheduler, rates_flag):
            rates, _ = build_scheduler(scheduler_factory(scheduler, rates_flag), steps, nominal(max(epochs, 1)))
            lrs = [*rates.get_last_lr()]
            for _ in range(min(epochs, TRIED_EPOCHS)):
                rates.step()
                lrs += rates.get_last_lr()
    lowest = -1e-6 * max(lrs)  # rounding
    if not all(math.isfinite(rate) and rate >= lowest for rate in lrs):
        expected = "options that give finite learning rates, 0 or more"
        _refuse_infinite(scheduler, rates_flag, expected)
        raise BadInput(rates_flag, scheduler.name, expected)


def _refuse_infinite(choice: Choice, key: str, expected: str) -> None:
    """Raise BadInput for an option that the user has set to infinity."""
    for name, value in choice.init_args.items():
        if isinstance(value, float) and math.isinf(value) and value != choice.signature.defaults.get(name):
            raise BadInput(f"{key}.{name}", value, expected)


def check_trainer(options: Mapping[str, Any]) -> None:
    """Raise BadInput for the first of the Trainer's options with which nothing is trained, or that means nothing."""
    numbers = {name: value for name, value in options.items() if isinstance(value, int | float)}
    for name, value in numbers.items():
        if name in AT_LEAST and not value >= AT_LEAST[name]:
            raise BadInput(f"trainer.{name}", value, f"a number, at least {AT_LEAST[name]}")
        if name in ABOVE_ZERO and not value > 0:
            raise BadInput(f"trainer.{name}", value, "a number above 0")
        if name in FRACTIONS and isinstance(value, float) and value > 1:
            raise BadInput(f"trainer.{name}", value, "a whole number of batches, or a fraction of them, up to 1.0")
    chosen = options.get("callbacks")
    for place, callback in enumerate(chosen) if isinstance(chosen, list) else [("", chosen)]:
        patience = callback.init_args.get("patience") if isinstance(callback, Choice) else None
        if isinstance(patience, int) and patience < 0:
            flag = f"trainer.callbacks.{place}.patience".replace("..", ".")
            raise BadInput(flag, patience, "a number of checks without improvement, at least 0")
    if (limit := options.get("max_time")) is not None:
        with refusals(Choice("Trainer", dict(options)), "trainer.max_time"):
            seconds = callbacks.Timer(limit).time_remaining() or 0
        if seconds < 1:
            raise BadInput("trainer.max_time", limit, "a time of at least a second, as 00:01:30:00")
    ends = any(options.get(name) is not None for name in ("max_time", "callbacks"))
    if numbers.get("max_epochs") == -1 and numbers.get("max_steps", -1) == -1 and not ends:
        raise BadInput("trainer.max_epochs", -1, "--trainer.max_steps or --trainer.max_time beside it")
    for what in ("epochs", "steps"):
        least, most = numbers.get(f"min_{what}", 0), numbers.get(f"max_{what}", -1)
        if most < 1 and most != -1:
            raise BadInput(f"trainer.max_{what}", most, f"a number of {what}, at least 1, or -1 for no limit")
        if least > most != -1:
            raise BadInput(f"trainer.min_{what}", least, f"at most --trainer.max_{what}, {most}")
