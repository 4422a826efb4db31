"""When the Trainer validates, and what the user's callbacks then read: whether it is there, before any training."""

import copy
import math
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EarlyStopping, LearningRateFinder, ModelCheckpoint

from apprentice.batch import Batch
from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from harness.runs.quiet import notice
from harness.runs.session import Session
from lit_modules.run_callbacks import check_monitor
from lit_modules.training.loop import Loop
from lit_modules.training.training_log import logged_names
from strategies.base.private import callbacks_of

MOST_NAMES = 8  # names in a message, for each stage
ATTRIBUTES: dict[type[Callback], str] = {LearningRateFinder: "lr", BackboneFinetuning: "backbone"}  # of the module


Monitor: TypeAlias = EarlyStopping | ModelCheckpoint


def check_callbacks(session: Session, trainer: Trainer, stages: Mapping[str, Loop]) -> None:
    """Raise BadInput if a callback would not find what it reads in any stage, each a fit of a module.

    Also if `val_check_interval` is too long.
    """
    every, batches = trainer.val_check_interval, session.data.train_batches(trainer)
    if isinstance(every, int) and every > batches and trainer.check_val_every_n_epoch is not None:
        expected = f"at most {batches}, the batches of an epoch; `trainer.check_val_every_n_epoch null` counts on"
        raise BadInput("trainer.val_check_interval", every, expected)
    chosen = session.config.trainer.init_args["callbacks"]
    for place, callback in enumerate(callbacks_of(trainer)):
        flag = f"trainer.callbacks.{place}" if isinstance(chosen, list) else "trainer.callbacks"
        needed = next((name for kind, name in ATTRIBUTES.items() if isinstance(callback, kind)), None)
        if needed is not None and not all(hasattr(module, needed) for module in stages.values()):
            expected = f"a callback for modules without .{needed}, as those of {' and '.join(stages)}"
            raise BadInput(flag, type(callback).__name__, expected)
        if isinstance(callback, Monitor) and callback.monitor is not None:
            names = {stage: list_monitored(module, trainer, callback, session) for stage, module in stages.items()}
            _check_monitor(callback, f"{flag}.monitor", names)


def check_monitors(session: Session, trainer: Trainer, module: Loop) -> None:
    """Raise BadInput if `best_epoch` or `early_stopping` names no score, or no score that there will be."""
    value, learners = (
        vars(session.config).get("early_stopping"),
        [name for name in module.runs if module.peers_of(name)],
    )
    if value is not None and learners:
        expected = f"students that learn alone; {learners[0]} learns from {module.peers_of(learners[0])[0]}"
        raise BadInput("early_stopping", value, expected)
    every, epochs = trainer.check_val_every_n_epoch or 1, trainer.max_epochs or -1
    for flag in ("best_epoch", "early_stopping"):
        if (monitor := vars(session.config).get(flag)) is not None:
            check_monitor(module, monitor, flag)
            if not session.used["validation"]:
                raise BadInput(
                    flag, monitor, "samples to validate on: `data.validation_size`, limit_val_batches above 0"
                )
            if every > epochs > 0:
                raise BadInput("trainer.check_val_every_n_epoch", every, f"at most {epochs}, the epochs of training")


def _check_monitor(callback: Monitor, flag: str, names_by_stage: Mapping[str, list[str]]) -> None:
    if not any(callback.monitor in names for names in names_by_stage.values()):
        logged = "; ".join(f"{stage}: {_join_first(names)}" for stage, names in names_by_stage.items())
        raise BadInput(flag, callback.monitor, f"what a stage logs before it is looked at; {logged}")


def drop_unsuited(session: Session, stage: str, module: Loop, trainer: Trainer) -> None:
    """Remove a stage's callbacks that monitor what only another stage logs, with a notice for each."""
    callbacks = callbacks_of(trainer)
    for callback in callbacks[:]:
        monitor = callback.monitor if isinstance(callback, Monitor) else None
        if (
            isinstance(callback, Monitor)
            and monitor
            and monitor not in list_monitored(module, trainer, callback, session)
        ):
            callbacks.remove(callback)
            notice(f"{stage:15}  without {type(callback).__name__}, as it logs no {monitor}")


def list_monitored(module: Loop, trainer: Any, callback: Monitor, session: Session) -> list[str]:
    """List the names that are logged before this callback first looks."""
    epoch, every = session.data.train_batches(trainer), trainer.val_check_interval
    if isinstance(callback, EarlyStopping):
        at_epoch_end = callback._check_on_train_epoch_end
    else:
        at_epoch_end = callback._save_on_train_epoch_end
    if at_epoch_end is None:  # as the callback's `setup` has it
        at_epoch_end = every == 1.0 and trainer.check_val_every_n_epoch == 1
    interval = max(int(epoch * every), 1) if isinstance(every, float) else every if isinstance(every, int) else 1
    epochs_before = (trainer.check_val_every_n_epoch or 1) - 1
    # In batches, when the fit validates for the first time, and when the callback looks.
    validated = epochs_before * epoch + interval if session.used["validation"] else math.inf
    looked = epoch if at_epoch_end else validated
    pair = session.data.samples(
        "train", torch.arange(min(2, session.data.sizes["train"])), cast("torch.dtype", module.dtype)
    )
    tried = copy.deepcopy(module).train()  # BatchNorm's statistics change
    values = with_seed(0, lambda: tried.shard_step(Batch.of(pair, 0, shared=False)))[1]
    logged = logged_names(module.run_scores.names(), values)
    names = list(logged["validation"]) if validated <= looked < math.inf else []
    if at_epoch_end or epoch < looked < math.inf:  # after what is logged there
        names += logged["epoch"]
    steps = 0 if looked == math.inf else math.ceil(looked / trainer.accumulate_grad_batches)
    if 0 < trainer.log_every_n_steps <= steps:
        names += logged["step"]
    return names


def _join_first(names: list[str]) -> str:
    return ", ".join(names if len(names) <= MOST_NAMES else [*names[:MOST_NAMES], "..."]) or "nothing that early"
