"""The cases of the study, a net on one device, split over several, and pipelined in every way; and the options."""

import math
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from apprentice.errors import BadInput
from harness import cli
from harness.runs.options import OneSeedOptions
from harness.runs.trainer import MakeTrainer
from lab.studies.isolation import DURATION, TIMEOUT, probe, with_strategy

ONE = "one device"
ONE_STAGE = ("GPipe", "1F1B")  # schedules with one stage a rank: theirs is the bubble that has a formula
QUICK = {"batch_size": 8, "image_size": 32, "num_classes": 10, "split_sizes": [2, 4], "repeats": 2, "batches": 1}
MAX_COUNT = 2**20  # of anything that is counted
TUTORIALS_CUT = "model.layer2"
COUNT = cli.Limit(lambda value: 1 <= value <= MAX_COUNT, f"at least 1, at most {MAX_COUNT}")


@dataclass
class Options(OneSeedOptions):
    """Options of the study; sizes are the tutorial's."""

    batch_size: int = cli.option(120, COUNT)
    """images of a step."""
    image_size: int = cli.option(128, COUNT)
    """their height and width."""
    num_classes: int = cli.option(1000, COUNT)
    """outputs of the net."""
    split_sizes: list[int] = cli.option(lambda: [1, 3, 5, 8, 10, 12, 20, 40, 60], on_resume=cli.GROWS)
    """images of a micro-batch."""
    repeats: int = cli.option(10, COUNT)
    """how often each row is timed."""
    batches: int = cli.option(3, COUNT)
    """steps that are timed together."""
    cut_after: str | None = TUTORIALS_CUT
    """path of the layer after which the net is cut in two, beside the cut of `trainer.strategy.balance`."""
    quick: bool = False
    """take small sizes wherever none are given."""
    quick_values: ClassVar[Mapping[str, Any]] = QUICK
    idle: ClassVar[Collection[str]] = ("checkpoint_every",)
    why_inexact: ClassVar[str] = "each row has other micro-batches"

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.split_sizes
        if not sizes or len(set(sizes)) < len(sizes) or not all(1 <= size < self.batch_size for size in sizes):
            raise BadInput("split_sizes", sizes, f"numbers from 1 to {self.batch_size - 1}, none of them twice")


@dataclass(frozen=True)
class Cut:
    """How layers are divided into stages."""

    label: str  # `by time`, `after layer2`
    balance: str | list[int]  # as the strategy takes it: a way to find the sizes of stages, or the sizes

    @classmethod
    def from_balance(cls, balance: str | list[int]) -> "Cut":
        """Return the cut that an option of the strategy describes."""
        return cls(f"by {balance}" if isinstance(balance, str) else f"into {balance}".replace(", ", ","), balance)


BY_TIME = Cut.from_balance("time")


@dataclass(frozen=True, eq=False)
class Case:
    """One way to compute a step."""

    name: str  # in the table
    kind: str  # "one", "split" or "pipelined"
    num_microbatches: int  # into which a batch is cut
    size: int  # the most images of a micro-batch
    trainer: MakeTrainer  # makes a Trainer for this way
    devices: int = 1  # processes
    schedule: str | None = None  # torch's name; None on one device
    cut: Cut | None = None  # of the net; None on one device
    bubble_bound: float | None = None  # the largest speed-up that the schedule allows; None where there is no formula


class Cases:
    """Makes all cases for the Trainer's devices and these schedules, with the options of its pipeline strategy.

    Measures `cut`, of two stages, beside the strategy's own cut. Collects in `unfit` why cases can't be measured.
    """

    def __init__(self, options: Namespace, schedules: Sequence[str], cut: Cut | None) -> None:
        self._trainer, self._schedules = options.trainer, schedules
        self._batch_size, self._split_sizes = options.batch_size, options.split_sizes
        self._strategy = _pipeline_strategy(self._trainer)
        left_out = dict.fromkeys(DURATION, "`repeats` says how long a row is measured")
        left_out["gradient_clip_val"] = "one device clips no gradients of micro-batches"
        trainer = probe(self._trainer, self._strategy, left_out)
        self.devices = trainer.num_devices
        if self.devices < 2:
            raise BadInput("trainer.devices", self.devices, "at least 2, the ranks of a pipeline")
        self._schedule = self._strategy.init_args["schedule"]
        fits = self.devices == 2 and self._schedule in ONE_STAGE
        strategy_cut = Cut.from_balance(self._strategy.init_args["balance"])
        self.cuts = [cut, strategy_cut] if cut is not None and fits else [strategy_cut]
        self.unfit: dict[str, str] = {}

    def first(self) -> list[Case]:
        """Return one device, the split, and all sizes of micro-batches under the strategy's own schedule."""
        cases = [self._on_one_device(size) for size in [self._batch_size, *self._split_sizes]]
        for cut in self.cuts:
            cases += self._pipeline("GPipe", cut, self._batch_size)
        for cut in self.cuts:
            cases += [case for size in self._split_sizes for case in self._pipeline(self._schedule, cut, size)]
        return cases

    def side_by_side(self, size: int) -> list[Case]:
        """Return all schedules with micro-batches of this size; may include one of `first`."""
        return [case for name in self._schedules for case in self._pipeline(name, self.cuts[-1], size)]

    def _on_one_device(self, size: int) -> Case:
        """Return the case of one process that computes micro-batches of this size."""
        make = with_strategy(self._trainer, "auto", one=True)
        return Case(self._row_name(ONE, size), "one", self._count(size), size, make)

    def _pipeline(self, schedule: str, cut: Cut, size: int) -> list[Case]:
        """Return the case of a pipeline, or none, and then the reason is in `unfit`.

        Takes a few more micro-batches, of fewer images, where the schedule needs them. Cuts by time where `cut` gives
        the sizes of stages and the schedule has other stages. Whole batches are the plain split: nothing is pipelined.
        """
        schedules = {schedule, self._schedule}
        if isinstance(cut.balance, list) and len(schedules) > 1 and not schedules <= {*ONE_STAGE}:
            cut = BY_TIME
        fewest = self._count(size)
        kind, label = ("split", f"split {cut.label}") if fewest == 1 else ("pipelined", f"{schedule} {cut.label}")
        reason = ""
        for count in range(fewest, fewest + (1 if fewest == 1 else 2 * self.devices + 1)):
            options: dict[str, Any] = {"schedule": schedule, "balance": cut.balance, "num_microbatches": count}
            if schedule != self._schedule:
                options["stages_per_rank"] = None
            make = with_strategy(self._trainer, replace(self._strategy, init_args=self._strategy.init_args | options))
            try:
                make()
            except BadInput as error:
                reason = reason or cli.with_flag(error)
                continue
            bound = bubble_bound(self.devices, count) if schedule in ONE_STAGE else None
            size = size if count == fewest else self._count(count)
            return [Case(self._row_name(label, size), kind, count, size, make, self.devices, schedule, cut, bound)]
        self.unfit[self._row_name(label, size)] = reason
        return []

    def _count(self, size: int) -> int:
        return math.ceil(self._batch_size / size)

    def _row_name(self, name: str, size: int) -> str:
        return name if size == self._batch_size else f"{name}, split size {size}"


def _pipeline_strategy(trainer: cli.Choice) -> cli.Choice:
    """Return the Trainer's pipeline strategy; BadInput for another strategy, or options that rows set."""
    strategy, accumulate = trainer.init_args["strategy"], trainer.init_args["accumulate_grad_batches"]
    required = {"schedule", "num_microbatches", "data_parallel_size", "stages_per_rank", "balance"}
    if not isinstance(strategy, cli.Choice) or not required <= set(strategy.init_args):
        name = strategy.class_path if isinstance(strategy, cli.Choice) else strategy
        raise BadInput("trainer.strategy", name, "pipeline: it is what is measured; one device needs none")
    if accumulate != 1:
        raise BadInput("trainer.accumulate_grad_batches", accumulate, "1: a step is timed")
    count, replicas = (strategy.init_args[name] for name in ("num_microbatches", "data_parallel_size"))
    if count is not None:
        raise BadInput("trainer.strategy.num_microbatches", count, "not allowed, as `split_sizes` gives it")
    if replicas != 1:
        raise BadInput("trainer.strategy.data_parallel_size", replicas, "1: one pipeline")
    return replace(strategy, init_args=strategy.init_args | {"timeout": TIMEOUT})


def bubble_bound(ranks: int, num_microbatches: int) -> float:
    """Return the largest speed-up of equally slow stages: in a step a rank waits for ranks - 1 micro-batches."""
    return ranks * num_microbatches / (num_microbatches + ranks - 1)
