"""Which strategies there are to measure on these devices, and why others can't be."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from apprentice.errors import BadInput
from harness import config
from harness.runs.fit import MakeTrainer
from harness.runs.trainer import trainers
from harness.studies.isolation import can_fork

SINGLE, SPLIT = "single", "DataParallel"
TIMEOUT = 300.0
SEEN_TO = ("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "limit_train_batches", "limit_val_batches")


@dataclass(frozen=True)
class Row:
    """A strategy to be measured.

    Attributes:
        name: as `--only` takes it.
        devices: on so many.
        trainer: makes a Trainer that has it.
        options: the strategy's.
        exact: the number of shards, where equal bits are wanted.
        split: whether the net is to be wrapped in torch.nn.DataParallel.
        reference: what its weights are compared with; None for the row that others are compared with.
        unfit: why it can't be measured here, else empty.
    """

    name: str
    devices: int
    trainer: MakeTrainer
    options: dict[str, Any] = field(default_factory=dict)
    exact: int | None = None
    split: bool = False
    reference: "Row | None" = None
    unfit: str = ""


class Rows:
    """All rows for a number of devices.

    Args:
        trainer: the Trainer's settings; a strategy that is chosen there replaces the one of its name, or is added.
        exact: number of shards of the exact rows; None takes 8, or the number of devices if that is more.
        names: the project's strategies, as `config.Parser.add_trainer` takes them.

    Raises:
        BadInput: the devices are not there, or the settings can't be used.
    """

    def __init__(self, trainer: config.Choice, exact: int | None, names: config.Names) -> None:
        self._trainer, self._names, self._family = trainer, names, config.Strategies(names=names)
        check_left_out(trainer, SEEN_TO, "--steps says how long a row is measured")
        probe = self._make("auto")()
        self.devices, self._gpus = probe.num_devices, probe.num_devices * (probe.strategy.root_device.type == "cuda")
        if exact is not None and exact < self.devices:
            raise BadInput("exact", exact, f"at least {self.devices}, the number of devices")
        check_place(probe)
        self.exact = exact or max(8, self.devices)
        self.single = Row(SINGLE, 1, self._make("auto", one=True))
        self.known = {row.name: row for row in [self.single, *self._plain(), *self._exact(), self._split()]}

    def picked(self, only: Sequence[str] | None) -> tuple[list[Row], dict[str, str]]:
        """The rows to measure, one process first; why others, that were not asked for by name, are skipped.

        Raises:
            BadInput: a name is unknown, or its strategy can't be measured here.
        """
        wanted = config.pick(self.known, only)
        given = self._given()
        for row in wanted.values():
            if row.unfit and (only is not None or row.name == given):
                flag, value = ("only", row.name) if only is not None else ("trainer.strategy", row.name)
                raise BadInput(flag, value, f"a strategy that can be measured here: {row.unfit}")
        rows = [row for row in wanted.values() if not row.unfit and row is not self.single]
        return [self.single, *rows], {row.name: row.unfit for row in wanted.values() if row.unfit}

    # Strategies

    def _given(self) -> str | None:
        strategy = self._trainer.init_args["strategy"]
        if strategy == "auto":
            return None
        if not isinstance(strategy, config.Choice):
            expected = f"auto, or one of {', '.join(self._names)}, or the import path of a class"
            raise BadInput("trainer.strategy", strategy, f"{expected}, whose options are then used in its row")
        return self._family.label(strategy)

    def _choices(self) -> dict[str, config.Choice]:
        """One choice for each strategy, under the first of its names: others only start ranks in another way."""
        seen, found = [], {}
        for name, (strategy, sets) in self._names.items():
            kind = strategy, {option: value for option, value in sets.items() if option != "start_method"}
            if kind not in seen:
                seen.append(kind)
                found[name] = impatient(self._family.choose(name))
        if (given := self._given()) is not None:
            found[given] = self._trainer.init_args["strategy"]
        return {name: forking(choice) for name, choice in found.items() if isinstance(choice, config.Choice)}

    def _plain(self) -> list[Row]:
        return [self._checked(self._row(name, choice, self.single)) for name, choice in self._choices().items()]

    def _exact(self) -> list[Row]:
        choices = {name: choice for name, choice in self._choices().items() if self._family.exact(choice)}
        if str(self._trainer.init_args.get("precision")) in {"16", "16-mixed"}:
            why = "--exact can't hold with --trainer.precision 16-mixed, which scales the loss"
            return [Row(f"{name}-exact", self.devices, self._make("auto"), unfit=why) for name in choices]
        alone = Row(f"{SINGLE}-exact", 1, self._make(choices["ddp"], self.exact, one=True), exact=self.exact)
        return [self._checked(self._row(f"{name}-exact", choice, alone)) for name, choice in choices.items()]

    def _row(self, name: str, choice: config.Choice, reference: Row) -> Row:
        make = self._make(choice, reference.exact)
        return Row(name, self.devices, make, choice.init_args, reference.exact, reference=reference)

    def _split(self) -> Row:
        unfit = "" if self._gpus > 1 else "torch.nn.DataParallel needs at least 2 GPUs"
        trainer = self._make("auto", one=True)
        return Row(SPLIT, self.devices, trainer, split=True, reference=self.single, unfit=unfit)

    def _checked(self, row: Row) -> Row:
        unfit, group = "", row.options.get("shard_size")
        try:
            row.trainer()
        except BadInput as error:
            if row.name == self._given():
                raise
            unfit = str(error)
        if group is not None and self.devices <= group:
            unfit = f"it would be fsdp, as its shard_size {group} is not below the number of devices, {self.devices}"
        return replace(row, unfit=unfit)

    def _make(self, strategy: Any, exact: int | None = None, one: bool = False) -> MakeTrainer:
        settings = {**self._trainer.init_args, "strategy": strategy}
        if one:
            chosen = settings["devices"]
            settings["devices"] = chosen[:1] if isinstance(chosen, list) else 1
        return trainers(config.Choice(self._trainer.class_path, settings), exact, self._names)


def check_left_out(trainer: config.Choice, keys: Sequence[str], instead: str) -> None:
    """Raise BadInput where one of the Trainer's settings is given that the comparison sees to itself."""
    for key in keys:
        if (value := trainer.init_args[key]) not in {None, -1}:
            raise BadInput(f"trainer.{key}", value, f"it left out: {instead}")


def check_place(probe: Trainer) -> None:
    """Raise BadInput where ranks would not be processes that are started from here."""
    if probe.num_nodes > 1:
        raise BadInput("trainer.num_nodes", probe.num_nodes, "1: one machine is measured")
    place = getattr(probe.strategy, "cluster_environment", None)
    if place is not None and place.creates_processes_externally:
        raise BadInput("trainer.devices", probe.num_devices, "a start without torchrun or srun: ranks are forked here")


def impatient(choice: Any) -> Any:
    """Wait minutes for a rank that hangs, not the half hour of a run that matters."""
    if "timeout" not in choice.init_args:
        return choice
    return replace(choice, init_args={**choice.init_args, "timeout": TIMEOUT})


def forking(choice: config.Choice) -> config.Choice:
    """Fork where a strategy may choose: ranks on GPUs would be started as sub-processes that run all of this again."""
    if choice.init_args.get("start_method") != "auto" or not can_fork():
        return choice
    return replace(choice, init_args={**choice.init_args, "start_method": "fork"})


def default_devices() -> int | str:
    """All GPUs, or two processes where there are none."""
    return "auto" if torch.cuda.is_available() else 2
