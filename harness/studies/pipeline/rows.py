"""What there is to measure: a net on one device, split over several, and pipelined in every way."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from apprentice.errors import BadInput
from harness import config
from harness.runs.fit import MakeTrainer
from harness.runs.trainer import trainers
from harness.studies.hardware.rows import SEEN_TO, check_left_out, check_place, forking, impatient

ONE = "one device"
ONE_STAGE = ("GPipe", "1F1B")  # schedules with one stage a rank: theirs is the bubble that has a formula
OPTIONS = ("schedule", "num_microbatches", "data_parallel_size", "stages_per_rank", "balance")


@dataclass(frozen=True)
class Cut:
    """How layers are dealt to stages.

    Attributes:
        label: `by time`, `after layer2`.
        balance: as the strategy takes it: a way to find the sizes of stages, or the sizes.
    """

    label: str
    balance: str | list[int]

    @classmethod
    def of(cls, balance: str | list[int]) -> "Cut":
        """The cut that a strategy's option stands for."""
        return cls(f"by {balance}" if isinstance(balance, str) else f"into {balance}".replace(", ", ","), balance)


BY_TIME = Cut.of("time")


@dataclass(frozen=True)
class Row:
    """One way to compute a step.

    Attributes:
        name: in the table.
        kind: "one", "split", "pipelined" or "inside": the split within one process.
        num_microbatches: into which a batch is cut.
        size: the most images of a micro-batch.
        trainer: makes a Trainer that computes so.
        devices: processes.
        schedule: torch's name; None on one device.
        cut: how the net is; None on one device.
        bubble_bound: the largest speed-up that the schedule leaves room for; None where there is no formula.
    """

    name: str
    kind: str
    num_microbatches: int
    size: int
    trainer: MakeTrainer
    devices: int = 1
    schedule: str | None = None
    cut: Cut | None = None
    bubble_bound: float | None = None


class Rows:
    """All rows for a number of devices.

    Args:
        trainer: the Trainer's settings; the pipeline strategy there has the options of the rows.
        names: the project's strategies, as `config.Parser.add_trainer` takes them.
        schedules: torch's names of those to compare.
        batch_size: images.
        split_sizes: images of a micro-batch, for the curve.
        cut: another cut beside that of the strategy, of two stages, or why there is none.

    Raises:
        BadInput: the devices are not there, or the settings can't be used.
    """

    def __init__(
        self,
        trainer: config.Choice,
        names: config.Names,
        schedules: Sequence[str],
        batch_size: int,
        split_sizes: Sequence[int],
        cut: Cut | None,
    ) -> None:
        check_left_out(trainer, SEEN_TO, "--repeats says how long a row is measured")
        check_left_out(trainer, ("gradient_clip_val",), "one device clips no gradients of micro-batches")
        self._trainer, self._names, self._schedules = trainer, names, schedules
        self._batch_size, self._split_sizes = batch_size, split_sizes
        self._strategy = self._checked()
        probe = self._make(self._strategy)()
        check_place(probe)
        self.devices = probe.num_devices
        if self.devices < 2:
            raise BadInput("trainer.devices", self.devices, "at least 2, the ranks of a pipeline")
        self._gpus = torch.cuda.device_count() if probe.strategy.root_device.type == "cuda" else 0
        self._schedule = self._strategy.init_args["schedule"]
        own = Cut.of(self._strategy.init_args["balance"])
        with_other = cut is not None and self.devices == 2 and self._schedule in ONE_STAGE
        self.cuts = [*([cut] if cut is not None and with_other else []), own]
        self.unfit: dict[str, str] = {}

    def _checked(self) -> config.Choice:
        strategy, settings = self._trainer.init_args["strategy"], self._trainer.init_args
        if not isinstance(strategy, config.Choice) or not set(OPTIONS) <= set(strategy.init_args):
            given = strategy.class_path if isinstance(strategy, config.Choice) else strategy
            raise BadInput("trainer.strategy", given, "pipeline: it is what is measured; one device needs none")
        if settings["accumulate_grad_batches"] != 1:
            raise BadInput("trainer.accumulate_grad_batches", settings["accumulate_grad_batches"], "1: a step is timed")
        options = strategy.init_args
        if options["num_microbatches"] is not None:
            raise BadInput(
                "trainer.strategy.num_microbatches", options["num_microbatches"], "it left out: --split_sizes"
            )
        if options["data_parallel_size"] != 1:
            raise BadInput("trainer.strategy.data_parallel_size", options["data_parallel_size"], "1: one pipeline")
        return forking(impatient(strategy))

    # Rows

    def first(self) -> list[Row]:
        """One device, the split, and all sizes of micro-batches, under the strategy's own schedule."""
        alone = [self.alone(size) for size in (self._batch_size, *self._split_sizes)]
        split = [self.pipelined("GPipe", cut, self._batch_size, split=True) for cut in self.cuts]
        curve = [self.pipelined(self._schedule, cut, size) for cut in self.cuts for size in self._split_sizes]
        return [*alone, *(row for row in [*split, *curve] if row is not None)]

    def side_by_side(self, size: int) -> list[Row]:
        """All schedules with micro-batches of this size; one of `first` may be among them."""
        rows = [self.pipelined(name, self.cuts[-1], size) for name in self._schedules]
        return [row for row in rows if row is not None]

    def inside(self, size: int) -> list[Row]:
        """The split within one process, whole batches and micro-batches, where there are two GPUs."""
        if self._gpus < 2 or self.devices != 2:
            self.unfit["split in one process"] = "it needs two GPUs"
            return []
        return [self._inside(each) for each in (self._batch_size, size)]

    def alone(self, size: int) -> Row:
        """One device that computes micro-batches of this size."""
        count = self._count(size)
        return Row(ONE if count == 1 else _sized(ONE, size), "one", count, size, self._make("auto", one=True))

    def _inside(self, size: int) -> Row:
        cut = self.cuts[0] if isinstance(self.cuts[0].balance, list) else Cut.of("parameters")
        name, count = f"split in one process {cut.label}", self._count(size)
        name = name if count == 1 else _sized(name, size)
        make, bound = self._make("auto", one=True), bubble_bound(2, count)
        return Row(name, "inside", count, size, make, cut=cut, bubble_bound=bound)

    def pipelined(self, schedule: str, cut: Cut, size: int, split: bool = False) -> Row | None:
        """A pipeline's row, with a few more micro-batches, of fewer images, where the schedule needs them; or None.

        Args:
            schedule: torch's name of it.
            cut: of the net; where the schedule has other stages than that, by time.
            size: images of a micro-batch.
            split: whether it stands for the plain split, of which nothing is pipelined.
        """
        cut, refused = self._fitting(schedule, cut), ""
        label = f"split {cut.label}" if split else f"{schedule} {cut.label}"
        for count in range(self._count(size), self._count(size) + (1 if split else 2 * self.devices + 1)):
            make = self._make(self._with(schedule, cut, count))
            try:
                make()
            except BadInput as error:
                refused = refused or str(error)
                continue
            bound = bubble_bound(self.devices, count) if schedule in ONE_STAGE else None
            if count > self._count(size):
                size = -(-self._batch_size // count)
            kind, name = ("split", label) if split else ("pipelined", _sized(label, size))
            return Row(name, kind, count, size, make, self.devices, schedule, cut, bound)
        self.unfit[label if split else _sized(label, size)] = refused
        return None

    def _fitting(self, schedule: str, cut: Cut) -> Cut:
        """The cut, unless it says how many layers each stage gets and the schedule has other stages."""
        as_many = schedule == self._schedule or {schedule, self._schedule} <= set(ONE_STAGE)
        return cut if as_many or isinstance(cut.balance, str) else BY_TIME

    def _with(self, schedule: str, cut: Cut, num_microbatches: int) -> config.Choice:
        options: dict[str, Any] = {"schedule": schedule, "balance": cut.balance, "num_microbatches": num_microbatches}
        if schedule != self._schedule:
            options["stages_per_rank"] = None
        return replace(self._strategy, init_args={**self._strategy.init_args, **options})

    def _count(self, size: int) -> int:
        return -(-self._batch_size // size)

    def _make(self, strategy: Any, one: bool = False) -> MakeTrainer:
        settings = {**self._trainer.init_args, "strategy": strategy}
        if one:
            chosen = settings["devices"]
            settings["devices"] = chosen[:1] if isinstance(chosen, list) else 1
        return trainers(config.Choice(self._trainer.class_path, settings), None, self._names)


def bubble_bound(ranks: int, num_microbatches: int) -> float:
    """The largest speed-up of stages that take the same time: a rank waits for ranks - 1 micro-batches of a step."""
    return ranks * num_microbatches / (num_microbatches + ranks - 1)


def _sized(name: str, size: int) -> str:
    return f"{name}, split size {size}"
