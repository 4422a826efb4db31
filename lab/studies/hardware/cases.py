"""Which strategies there are to measure on these devices, and why others can't be."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import LightningModule

from apprentice.errors import BadInput
from harness import cli
from harness.runs.trainer import MakeTrainer
from lab.studies.isolation import DURATION, TIMEOUT, probe, with_strategy
from strategies import FSDP, NAMES

SINGLE, SPLIT = "single", "DataParallel"


@dataclass(frozen=True)
class Case:
    """A strategy to measure."""

    name: str  # as `--only` takes it
    devices: int  # their number
    trainer: MakeTrainer  # makes a Trainer with the strategy
    options: dict[str, Any] = field(default_factory=dict)  # the strategy's
    exact: int | None = None  # the number of shards, where equal bits are wanted
    split: bool = False  # whether torch.nn.DataParallel wraps the net
    reference: "Case | None" = None  # whose weights its own are compared with; None for that case itself
    unfit: str = ""  # why it can't be measured here, or empty


class Cases:
    """All cases for the Trainer's devices; a strategy that is chosen there replaces the one of its name, or is added.

    `exact` is the number of shards of the exact cases; None takes 8, or the number of devices if that is more.
    """

    def __init__(self, trainer: cli.Choice, exact: int | None) -> None:
        self._trainer, self._family = trainer, cli.Strategies(names=NAMES)
        made = probe(trainer, "auto", dict.fromkeys(DURATION, "--steps says how long a row is measured"))
        self.devices = made.num_devices
        if exact is not None and exact < self.devices:
            raise BadInput("exact", exact, f"at least {self.devices}, the number of devices")
        exact = exact or max(8, self.devices)
        self._given = ""  # name of the strategy that the user has chosen
        choices = self._choices()
        self.single = alone = Case(SINGLE, 1, with_strategy(trainer, "auto", one=True))
        make = with_strategy(trainer, choices["ddp"], exact, one=True)
        alone_exact = Case(f"{SINGLE}-exact", 1, make, exact=exact)
        cases = [self._case(name, choice, alone) for name, choice in choices.items()]
        holding = {name: choice for name, choice in choices.items() if self._family.exact(choice)}
        cases += [self._case(f"{name}-exact", choice, alone_exact) for name, choice in holding.items()]
        gpus = self.devices > 1 and made.strategy.root_device.type == "cuda"
        unfit = "" if gpus else "torch.nn.DataParallel needs at least 2 GPUs"
        split = Case(SPLIT, self.devices, alone.trainer, split=True, reference=alone, unfit=unfit)
        self.known = {case.name: case for case in [alone, *cases, split]}

    def picked(self, only: Sequence[str] | None) -> tuple[list[Case], dict[str, str]]:
        """The cases to measure, one process first; and why others, not asked for by name, are skipped."""
        wanted = cli.pick(self.known, only)
        for case in wanted.values():
            if case.unfit and (only is not None or case.name == self._given):
                flag = "trainer.strategy" if only is None else "only"
                raise BadInput(flag, case.name, f"a strategy that can be measured here: {case.unfit}")
        fit = [case for case in wanted.values() if not case.unfit and case is not self.single]
        return [self.single, *fit], {case.name: case.unfit for case in wanted.values() if case.unfit}

    def suited(
        self, cases: Sequence[Case], module: LightningModule, only: Sequence[str] | None
    ) -> tuple[list[Case], dict[str, str]]:
        """The cases whose strategies can cut the module's layers, if they do; and why others can't."""
        unsuited: dict[str, str] = {}
        for case in cases:
            strategy = case.trainer().strategy if case.options.get("mesh") else None
            if isinstance(strategy, FSDP):
                try:
                    strategy.check_module(module)
                except ValueError as error:
                    unsuited[case.name] = str(error)
        asked = [name for name in unsuited if only is not None or name == self._given]
        if asked:
            raise BadInput("only", asked[0], f"a strategy that can train this net: {unsuited[asked[0]]}")
        return [case for case in cases if case.name not in unsuited], unsuited

    def _choices(self) -> dict[str, cli.Choice]:
        """One choice for each strategy, under the first of its names: others only start ranks in another way."""
        kinds: dict[Any, str] = {}
        for name, (strategy, sets) in NAMES.items():
            kinds.setdefault((strategy, *(f"{item}" for item in sets.items() if item[0] != "start_method")), name)
        known = {name: self._family.choose(name) for name in kinds.values()}
        found = {name: replace(each, init_args=each.init_args | {"timeout": TIMEOUT}) for name, each in known.items()}
        given = self._trainer.init_args["strategy"]
        if given == "auto":
            return found
        if not isinstance(given, cli.Choice):
            expected = f"auto, or one of {', '.join(NAMES)}, or the import path of a class"
            raise BadInput("trainer.strategy", given, f"{expected}, whose options are then used in its row")
        self._given = self._family.label(given)
        return {**found, self._given: given}

    def _case(self, name: str, choice: cli.Choice, reference: Case) -> Case:
        make, group = with_strategy(self._trainer, choice, reference.exact), choice.init_args.get("shard_size")
        unfit = ""
        try:
            make()
        except BadInput as error:
            if name == self._given:
                raise
            unfit = cli.with_flag(error)
        if group is not None and self.devices <= group:
            unfit = f"it would be fsdp, as its shard_size {group} is not below the number of devices, {self.devices}"
        return Case(name, self.devices, make, choice.init_args, reference.exact, reference=reference, unfit=unfit)
