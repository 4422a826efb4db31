"""The cases of the study: strategies that can be measured on these devices, and why others can't."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import LightningModule

from apprentice.errors import BadInput
from harness import cli
from harness.runs.arm_names import pick
from harness.runs.trainer import MakeTrainer
from harness.runs.training_options import Strategies
from lab.studies.isolation import DURATION, TIMEOUT, probe, with_strategy
from strategies import FSDP, NAMES

SINGLE = "single"


@dataclass(frozen=True)
class Case:
    """A strategy to measure."""

    name: str  # as `only` takes it
    devices: int  # their number
    trainer: MakeTrainer  # makes a Trainer with the strategy
    options: dict[str, Any] = field(default_factory=dict)  # the strategy's
    exact: int | None = None  # the number of shards of an exact case
    reference: "Case | None" = None  # whose weights its own are compared with; None for that case itself
    unfit: str = ""  # why it can't be measured here, or empty


class Cases:
    """Makes all cases for the Trainer's devices; the Trainer's strategy replaces the one of its name, or is added.

    `exact` is the number of shards of the exact cases; None takes 8, or the number of devices if that is more.
    """

    def __init__(self, trainer: cli.Choice, exact: int | None) -> None:
        self._trainer, self._family = trainer, Strategies()
        left_out = dict.fromkeys(DURATION, "`steps` says how long a row is measured")
        self.devices = probe(trainer, "auto", left_out).num_devices
        if exact is not None and exact < self.devices:
            raise BadInput("exact", exact, f"at least {self.devices}, the number of devices")
        exact = exact or max(8, self.devices)
        self._user_strategy = ""  # name of the strategy that the user has chosen
        choices = self._choices()
        self.single = alone = Case(SINGLE, 1, with_strategy(trainer, "auto", one=True))
        make = with_strategy(trainer, choices["ddp"], exact, one=True)
        alone_exact = Case(f"{SINGLE}-exact", 1, make, exact=exact)
        cases = [self._case(name, choice, alone) for name, choice in choices.items()]
        exact_choices = {name: choice for name, choice in choices.items() if self._family.exact(choice)}
        cases += [self._case(f"{name}-exact", choice, alone_exact) for name, choice in exact_choices.items()]
        self.by_name = {case.name: case for case in [alone, *cases]}

    def pick(self, only: Sequence[str] | None) -> tuple[list[Case], dict[str, str]]:
        """Return the cases to measure, one process first; and why others, that the user doesn't name, are skipped."""
        picked = pick(self.by_name, only).values()
        for case in picked:
            if case.unfit and (only is not None or case.name == self._user_strategy):
                flag = "trainer.strategy" if only is None else "only"
                raise BadInput(flag, case.name, f"a strategy that can be measured here: {case.unfit}")
        fit = [case for case in picked if not case.unfit and case is not self.single]
        return [self.single, *fit], {case.name: case.unfit for case in picked if case.unfit}

    def pick_for_module(
        self, cases: Sequence[Case], module: LightningModule, only: Sequence[str] | None
    ) -> tuple[list[Case], dict[str, str]]:
        """Return the cases whose strategies can train the module; and why others can't cut its layers."""
        unsuited: dict[str, str] = {}
        for case in cases:
            strategy = case.trainer().strategy if case.options.get("mesh") else None
            if isinstance(strategy, FSDP):
                try:
                    strategy.check_module(module)
                except BadInput as error:
                    if only is not None or case.name == self._user_strategy:
                        raise BadInput("only", case.name, f"a strategy that can train this net: {error}") from None
                    unsuited[case.name] = str(error)
        return [case for case in cases if case.name not in unsuited], unsuited

    def _choices(self) -> dict[str, cli.Choice]:
        """Return a choice for each strategy, under the first of its names; the others start ranks in another way."""
        kinds: dict[Any, str] = {}
        for name, (strategy_class, options) in NAMES.items():
            different = (f"{item}" for item in options.items() if item[0] != "start_method")
            kinds.setdefault((strategy_class, *different), name)
        choices = {}
        for name in kinds.values():
            choice = self._family.choose(name)
            choices[name] = replace(choice, init_args=choice.init_args | {"timeout": TIMEOUT})
        strategy = self._trainer.init_args["strategy"]
        if strategy == "auto":
            return choices
        if not isinstance(strategy, cli.Choice):
            expected = f"auto, or one of {', '.join(NAMES)}, or the import path of a class"
            raise BadInput("trainer.strategy", strategy, f"{expected}, whose options are then used in its row")
        self._user_strategy = self._family.label(strategy)
        return {**choices, self._user_strategy: strategy}

    def _case(self, name: str, choice: cli.Choice, reference: Case) -> Case:
        make, group = with_strategy(self._trainer, choice, reference.exact), choice.init_args.get("shard_size")
        unfit = ""
        try:
            make()
        except BadInput as error:
            if name == self._user_strategy:
                raise
            unfit = cli.with_flag(error)
        if group is not None and self.devices <= group:
            unfit = f"it would be fsdp, as its shard_size {group} is not below the number of devices, {self.devices}"
        return Case(name, self.devices, make, choice.init_args, reference.exact, reference=reference, unfit=unfit)
