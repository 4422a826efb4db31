"""The options of Lightning's Trainer, and the strategies, optimizers and schedulers to choose from.

Beside what their types tell, values are checked that Lightning and torch accept, and nothing is trained with.
"""

import warnings
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pkgutil import resolve_name
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, callbacks, loggers, strategies
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import nn
from torch.optim import lr_scheduler

from apprentice.errors import BadInput
from harness.cli.classes import Choice, Chosen, Classes, factory, refusals
from harness.cli.messages import near
from harness.cli.options import Limit, at_least
from harness.cli.parser import Parser
from harness.cli.resuming import FIXED, FREE, OnResume
from harness.cli.signatures import Signature, options_of
from lit_modules.schedules import CosineWarmup, MakeScheduler, build_scheduler, nominal
from strategies import NAMES
from strategies.ddp import DDP

OWNED = {  # arguments of the Trainer that the experiment sets, and what to do instead
    "barebones": "not allowed, as a run has curves and checkpoints; `trainer.logger false` writes fewer files",
    "default_root_dir": "`out FOLDER` in its place",
    "enable_autolog_hparams": "not allowed, as loggers always have the hyperparameters",
    "enable_checkpointing": "not allowed, as a run keeps its own checkpoints; `checkpoint_every SECONDS` says when",
    "fast_dev_run": "`trainer.max_epochs 1` `trainer.limit_train_batches 1`, and 1 for limit_val_batches and "
    "limit_test_batches, in its place: it would leave no table",
    "inference_mode": "not allowed, as nets are always tested in inference mode",
    "limit_predict_batches": "`trainer.limit_test_batches`, whose predictions the run keeps",
    "model_registry": "not allowed, as a run writes into `out FOLDER` alone",
    "overfit_batches": "`data.train_size N` in its place: the same N samples in each epoch",
    "reload_dataloaders_every_n_epochs": "not allowed, as one loader serves all epochs, each in its own order",
    "sync_batchnorm": "not allowed, as BatchNorm has the global batch's statistics anyway, a shard's with `exact`",
    "use_distributed_sampler": "not allowed, as the data module deals samples to ranks",
}
# Arguments of strategies that the Trainer passes, that are objects, or that have a flag of their own.
NOT_OPTIONS = frozenset({
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "ddp_comm_state",
    "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period", "exact",
})  # fmt: skip
SHARE = Limit(
    lambda value: value > 0 and (isinstance(value, int) or value <= 1),
    "a whole number of batches above 0, or a fraction of them, up to 1.0",
)
# With other values of these, Lightning trains nothing, or fails in an epoch.
LIMITS = {
    "max_epochs": Limit(lambda value: value >= 1 or value == -1, "a number of epochs, at least 1, or -1 for no limit"),
    "max_steps": Limit(lambda value: value >= 1 or value == -1, "a number of steps, at least 1, or -1 for no limit"),
    "accumulate_grad_batches": at_least(1, "batches"), "check_val_every_n_epoch": at_least(1, "epochs"),
    "log_every_n_steps": at_least(0, "steps"), "gradient_clip_val": Limit(lambda value: value >= 0, "0 or more"),
    "limit_train_batches": SHARE, "limit_test_batches": SHARE, "val_check_interval": SHARE,
    "limit_val_batches": Limit(lambda value: value == 0 or SHARE.holds(value), f"0, or {SHARE.expected}"),
}  # fmt: skip
# In place of the Trainer's own.
TYPES = {"logger": bool | Logger | list[Logger], "devices": int | list[int] | str}
# With these options no result changes, and a resumed run may have others.
ANY_ON_RESUME = (
    "devices", "strategy", "accelerator", "num_nodes", "logger", "log_every_n_steps", "enable_progress_bar",
    "enable_model_summary", "profiler",
)  # fmt: skip

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
    """What `trainer.strategy` chooses from; names that only Lightning looks up stay text."""

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
        """Return whether a choice can have `exact`: its class takes it."""
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


def add_trainer(
    parser: Parser,
    *,
    loggers: bool = True,
    on_resume: Mapping[str, OnResume] = MappingProxyType({}),
    idle: Iterable[str] = (),
    **defaults: Any,
) -> None:
    """Add `trainer.OPTION` for Lightning's Trainer, with options below its strategy and callbacks.

    `defaults` are in place of the Trainer's own, `idle` options do nothing here. `trainer.logger` switches ours, and
    names others where there are `loggers`. `on_resume` says how options that results depend on may change.
    """
    parser.idle |= {f"trainer.{name}" for name in idle}
    parser.classes |= {"trainer.callbacks": CALLBACKS, "trainer.strategy": Strategies()}
    parser.unchosen["trainer.strategy"] = DDP
    if loggers:
        parser.classes["trainer.logger"] = LOGGERS
    rules = {**dict.fromkeys(ANY_ON_RESUME, FREE), **on_resume}
    parser.add_class("trainer", _trainer_options(loggers), {"logger": True, **defaults}, rules)
    parser.add_check(check_trainer)


@cache
def _trainer_options(loggers: bool) -> Signature:
    return Signature(Trainer, OWNED, TYPES if loggers else {**TYPES, "logger": bool})


def add_optimizer(
    parser: Parser, default: Any = "Adam", scheduler_on_resume: OnResume = FIXED, apart: Sequence[str] = ()
) -> None:
    """Add `optimizer` and `scheduler`: torch's classes, tried out on a dummy net when parsed.

    Nets that may be trained `apart`, such as a teacher, have `NAME_optimizer` and `NAME_scheduler` beside them.
    """
    for prefix in ("", *(f"{name}_" for name in apart)):
        for key, (classes, about) in RATES.items():
            rule = scheduler_on_resume if prefix + key == "scheduler" else FIXED
            chosen = default if prefix + key == "optimizer" else None
            same = key if prefix else ""
            parser.add_choice(prefix + key, classes, chosen, defaults_from=same, about=about, on_resume=rule)
        parser.add_check(partial(check_optimizer, prefix=prefix))


def check_optimizer(config: Namespace, prefix: str = "") -> None:
    """Make a dummy net's optimizer and scheduler; raise BadInput for what they refuse, or a rate of 0."""
    optimizer_flag, scheduler_flag = (prefix + key if vars(config)[prefix + key] else key for key in RATES)
    if prefix and (optimizer_flag, scheduler_flag) == tuple(RATES):  # checked without the prefix
        return
    optimizer, scheduler = vars(config)[optimizer_flag], vars(config)[scheduler_flag]
    rate = optimizer.init_args.get("lr")
    if rate == 0:
        raise BadInput(f"{optimizer_flag}.lr", 0, "a number above 0; with this one nothing is trained")
    if isinstance(rate, int | float) and rate > torch.finfo(torch.float32).max:
        raise BadInput(f"{optimizer_flag}.lr", rate, "a number that float32 holds")
    net = nn.Linear(2, 2, bias=False)  # of two dimensions, which Muon needs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with refusals(optimizer, optimizer_flag):
            steps = factory(optimizer, optimizer_flag)(net.parameters())
        if scheduler is not None:
            with refusals(scheduler, scheduler_flag):
                build_scheduler(scheduler_factory(scheduler, scheduler_flag), steps, nominal())[0].step()


def check_trainer(config: Namespace) -> None:
    """Raise BadInput for the first of the Trainer's options with which nothing is trained, or without an end."""
    options = config.trainer.init_args
    for name, limit in LIMITS.items():
        value = options.get(name)
        if isinstance(value, int | float) and not limit.holds(value):
            raise BadInput(f"trainer.{name}", value, limit.expected)
    ends = any(options.get(name) is not None for name in ("max_time", "callbacks"))
    if options.get("max_epochs") == -1 and options.get("max_steps") == -1 and not ends:
        raise BadInput("trainer.max_epochs", -1, "`trainer.max_steps` or `trainer.max_time` beside it")
