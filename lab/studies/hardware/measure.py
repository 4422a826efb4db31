"""Measures a case: a fit for its figures, and one for its weights."""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from apprentice.errors import BadInput
from harness.runs.files import write_json
from harness.runs.progress import Lines
from lab.strategies.param_server import ParamServer
from lab.studies.hardware.cases import Case
from lab.studies.isolation import QUIET, Stoppable, fit_isolated
from lab.studies.meters import Overlap, PeakMemory, Stamps, sent_bytes, state_bytes

COMPARED = 1, 20  # steps after which weights are compared
Weights = Mapping[str, Tensor]


class StrategyTiming(TypedDict):
    """A measured case."""

    strategy: str
    devices: int
    exact: int | None
    images_per_second: float
    speedup: float  # over one process
    step_ms: float
    state_bytes_per_rank: list[int]
    peak_memory_per_rank: list[int | None]
    bytes_sent_per_step: float | None  # by a rank, on average
    hidden_share: float | None
    first_difference: float | int
    max_difference: float | int
    threads_per_rank: int


class RankFigures(TypedDict, total=False):
    """The figures of a rank."""

    seconds: list[float]  # of each block
    sent: int | None  # bytes, in all blocks; None for RPC
    state: int  # bytes
    peak: int | None  # bytes of memory, until the blocks end
    hidden: float | None  # the share of communication; None for RPC
    threads: int


class Phases(NamedTuple):
    """The phases of a measured fit in their order, in batches."""

    warmup: int  # not measured
    block: int  # timed together: a whole period of a strategy that acts every few steps
    blocks: int  # the number of blocks; their bytes are counted
    profiled: int  # watched by a profiler, which slows them down

    @classmethod
    def of(cls, options: Mapping[str, Any], steps: int, accumulate: int = 1) -> "Phases":
        """Plan at least so many optimizer steps of `accumulate` batches for a strategy with these options.

        `period` is the number of steps between its actions; `start_step` and `warmup_steps` are steps before the first.
        """
        period = options.get("period") or 1
        starting = (options.get("start_step") or 0) + (options.get("warmup_steps") or 0)
        blocks = max(-(-steps // period), 3)
        return cls((4 + starting) * accumulate, period * accumulate, blocks, 3 * accumulate)

    @property
    def timed(self) -> int:
        return self.block * self.blocks

    @property
    def batches(self) -> int:
        return self.warmup + self.timed + self.profiled


class Measure(Stoppable):
    """Writes each rank's `RankFigures` to `rank<r>.json` in the folder."""

    def __init__(self, folder: Path, phases: Phases) -> None:
        self.folder, self.phases = folder, phases
        self.batch = 0
        self.figures: RankFigures = {"hidden": None}
        self._overlap: Overlap | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the meters; copy the weights first, as a fork shares its parent's."""
        device = trainer.strategy.root_device
        self._stamps, self._memory = Stamps(device), PeakMemory(device)
        self._counted = not isinstance(trainer.strategy, ParamServer)  # RPC also sends through shared memory
        pl_module._apply(torch.clone)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Mark the time before each block, count bytes before the first and after the last, then profile."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        timed = self.batch - self.phases.warmup
        self.batch += 1
        if timed == 0:
            self._sent = sent_bytes()
        if 0 <= timed <= self.phases.timed and timed % self.phases.block == 0:
            self._stamps.mark()
        if timed == self.phases.timed:
            sent = sent_bytes() if self._counted else None
            self.figures["sent"] = sent and sent - (self._sent or 0)
            self.figures["peak"] = self._memory.bytes()
            if trainer.world_size > 1 and self._counted:
                self._overlap = Overlap(trainer.strategy.root_device)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Count the state: gradients exist and are sharded; from the second step on moments exist, too."""
        if self.batch <= self.phases.warmup:
            self.figures["state"] = state_bytes(pl_module, trainer.optimizers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file, unless training has stopped itself: its figures would mislead."""
        if self.batch < self.phases.batches:
            return
        if self._overlap is not None:
            self.figures["hidden"] = self._overlap.share()
        self.figures |= {"seconds": self._stamps.seconds(), "threads": torch.get_num_threads()}
        write_json(self.folder / f"rank{trainer.global_rank}.json", self.figures)


class _KeepWeights(Stoppable):
    """Writes the weights after the steps in `COMPARED`, as one device has them, unless training has stopped itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: dict[int, Weights] = {}  # by step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step in COMPARED and step not in self.weights:
            weights = trainer.strategy.lightning_module_state_dict()
            self.weights[step] = {name: x.cpu().clone() for name, x in weights.items()}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and len(self.weights) == len(COMPARED):
            torch.save([*self.weights.values()], self.path)


@dataclass
class Bench:
    """Measures cases on one module and one data module; BadInput if there are too few batches for a step."""

    make: Callable[[], LightningModule]  # makes a new module
    data: Any  # the data module, set up, with `batch_size` and `sizes`
    steps: int  # optimizer steps that are timed at least
    accumulate: int = 1  # batches a step
    threads: int = 1  # of the case on one device

    def __post_init__(self) -> None:
        rows, accumulate = self.data.sizes["train"], self.accumulate
        self.batch_rows = min(self.data.batch_size, rows)
        whole = rows // self.batch_rows  # batches that are not cut short
        self.limit = whole // accumulate * accumulate  # at an epoch's end a step would be taken with fewer
        if not self.limit:
            raise BadInput("trainer.accumulate_grad_batches", accumulate, f"at most {whole}, the whole batches there")
        self._references: dict[str, list[Weights]] = {}

    def measure(self, case: Case) -> StrategyTiming:
        """Measure a case and return its row; the study sets the row's speed-up."""
        phases = Phases.of(case.options, self.steps, self.accumulate)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"rank{rank}.json" for rank in range(case.devices)]
            steps = phases.batches // self.accumulate
            self._fit(case, Measure(Path(folder), phases), files, steps, limit_train_batches=self.limit)
            ranks: list[RankFigures] = [json.loads(file.read_text()) for file in files]
        first, last = self._differences(case)
        seconds = max(statistics.median(rank["seconds"]) for rank in ranks) / phases.block
        sent = [rank["sent"] for rank in ranks if rank["sent"] is not None]
        hidden = [rank["hidden"] for rank in ranks if rank["hidden"] is not None]
        return {
            "strategy": case.name,
            "devices": case.devices,
            "exact": case.exact,
            "images_per_second": self.batch_rows / seconds,
            "speedup": 1.0,
            "step_ms": seconds * self.accumulate * 1e3,
            "state_bytes_per_rank": [rank["state"] for rank in ranks],
            "peak_memory_per_rank": [rank["peak"] for rank in ranks],
            "bytes_sent_per_step": statistics.mean(sent) * self.accumulate / phases.timed if sent else None,
            "hidden_share": statistics.mean(hidden) if hidden else None,
            "first_difference": first,
            "max_difference": last,
            "threads_per_rank": ranks[0]["threads"],
        }

    def _differences(self, case: Case) -> list[float | int]:
        """Return the largest difference of a weight, or the bits that differ, after the steps in `COMPARED`."""
        reference = case.reference or case
        if reference.name not in self._references:
            self._references[reference.name] = self._weights(reference)
        if reference is case:
            return [0.0] * len(COMPARED)
        pairs = zip(self._weights(case), self._references[reference.name], strict=True)
        return [difference(weights, others, in_bits=case.exact is not None) for weights, others in pairs]

    def _weights(self, case: Case) -> list[Weights]:
        """Fit in the precision in which a case is compared; return the weights after the steps in `COMPARED`."""
        precision = "64-true" if case.exact is None else "32-true"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights.pt"
            self._fit(case, _KeepWeights(file), [file], max(COMPARED), precision=precision)
            by_step: list[Weights] = torch.load(file, weights_only=True)
            return by_step

    def _fit(self, case: Case, callback: Callback, files: Iterable[Path], steps: int, **settings: Any) -> None:
        trainer = case.trainer(callbacks=[callback, Lines(case.name)], **QUIET | settings | {"max_steps": steps})
        fit_isolated(trainer, partial(trainer.fit, self.make(), self.data), self.threads)
        if not all(file.exists() for file in files):
            expected = f"settings that train the net for {steps} steps; its loss is not finite"
            raise BadInput("optimizer", "(as given)", expected)


def difference(weights: Weights, others: Weights, in_bits: bool = False) -> float | int:
    """Return the largest absolute difference of two nets' weights, or NaN; `in_bits` the number of bits that differ."""
    if {name: x.shape for name, x in weights.items()} != {name: x.shape for name, x in others.items()}:
        raise BadInput("weights", [*weights], "the weights of one net twice")
    pairs = [(x.flatten(), others[name].flatten()) for name, x in weights.items() if x.numel()]
    if in_bits:
        changes = [x.view(torch.uint8) ^ y.view(torch.uint8) for x, y in pairs]
        return sum(int(np.bitwise_count(x.numpy()).sum()) for x in changes)
    return torch.stack([(x.double() - y.double()).abs().max() for x, y in pairs]).max().item()
