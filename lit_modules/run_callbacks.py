"""Callbacks that follow each run of a Loop by itself: its best epoch, and when it has learnt enough."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.training.loop import Loop

VALIDATION = "val/"  # how names of scores of validation begin


class RunMonitor(Callback):
    """Looks at a score of each run that still trains, whenever the fit has validated.

    Args:
        monitor: the score's name as a run has it, such as `val/acc`.
    """

    def __init__(self, monitor: str) -> None:
        self.monitor = monitor
        self.best: dict[str, dict[str, Any]] = {}  # by run, its best value so far, and what belongs to it

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict["best"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise BadInput if the module's runs have no such score."""
        check_monitor(cast("Loop", pl_module), self.monitor, "monitor")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking:
            return
        module = cast("Loop", pl_module)
        values = {
            run: module.training_log.validated.get(f"{run}/{self.monitor}".lstrip("/")) for run in module.active_runs
        }
        self.validated(trainer, module, {run: value for run, value in values.items() if value is not None})

    def validated(self, trainer: Trainer, module: Loop, values: Mapping[str, float]) -> None:
        """Take the values of the runs that train."""
        raise NotImplementedError

    def improved(self, module: Loop, values: Mapping[str, float]) -> Iterator[str]:
        """Yield the runs whose value is better than all before; of equal ones the earliest stays."""
        sign = 1.0 if module.task.higher_is_better(self.monitor.removeprefix(VALIDATION)) else -1.0
        for run, value in values.items():
            best = self.best[run]["value"] if run in self.best else math.nan
            if not math.isnan(value) and (math.isnan(best) or sign * value > sign * best):
                yield run


class BestEpoch(RunMonitor):
    """Keeps each run's weights of its best validation, on the CPU of rank zero, and in checkpoints."""

    def validated(self, trainer: Trainer, module: Loop, values: Mapping[str, float]) -> None:
        runs = [*self.improved(module, values)]
        if not runs:
            return
        state = trainer.strategy.lightning_module_state_dict()  # collective; empty on ranks that do not save
        for run in runs:
            weights = {name: state[name].detach().cpu().clone() for name in module.names_of(run, state)}
            self.best[run] = {"value": values[run], "epoch": module.epochs_done, "weights": weights}


class StopRuns(RunMonitor):
    """Stops a run after so many validations without a better value; the others train on.

    Args:
        monitor: the score's name.
        patience: how many, as Lightning's `EarlyStopping` counts them.
    """

    def __init__(self, monitor: str, patience: int = 3) -> None:
        super().__init__(monitor)
        self.patience = patience

    def validated(self, trainer: Trainer, module: Loop, values: Mapping[str, float]) -> None:
        better = {*self.improved(module, values)}
        for run, value in values.items():
            if run in better:
                self.best[run] = {"value": value, "waited": 0}
                continue
            entry = self.best.setdefault(run, {"value": value, "waited": 0})
            entry["waited"] += 1
            early = trainer.current_epoch + 1 < (trainer.min_epochs or 0) or trainer.global_step < (
                trainer.min_steps or 0
            )
            if entry["waited"] >= self.patience and not early:
                module.stop(run)


def check_monitor(module: Loop, monitor: str, flag: str) -> None:
    """Raise BadInput if a score is none of the validation's of all runs."""
    names = [f"{VALIDATION}{name}" for name in ("loss", *module.scores_of(module.runs[0]).names) if name != "correct"]
    if monitor not in names:
        raise BadInput(flag, monitor, f"a score of the validation: {', '.join(dict.fromkeys(names))}")


def best_weights(best: Mapping[str, Mapping[str, Any]], runs: list[str]) -> dict[str, Tensor]:
    """The weights of some runs' best epochs by their names in the module's state."""
    return {name: value for run in runs if run in best for name, value in best[run]["weights"].items()}
