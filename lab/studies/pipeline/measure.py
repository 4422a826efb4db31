"""Measures a case: a fit of the tutorial's task, timed inside its ranks."""

import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from harness.runs.files import write_json
from harness.runs.progress import Lines
from lab.studies.isolation import QUIET, Stoppable, fit_isolated
from lab.studies.pipeline.cases import Case
from strategies import PipelineStrategy

LEARNING_RATE = 0.001  # the tutorial's
WARMUP = 2  # steps: the first also allocates, chooses kernels and exchanges the shapes of activations


class StepTiming(TypedDict):
    """A measured case."""

    name: str
    schedule: str | None
    num_microbatches: int
    seconds_per_step: list[float]  # of each repeat, of the slowest rank
    speedup: float  # over one device
    bubble_bound: float | None  # the largest speed-up that the schedule allows
    share_of_bound: float | None


class Event(NamedTuple):
    """A computation of a pipeline's step."""

    rank: int
    stage: int
    microbatch: int
    kind: str  # "forward", "backward" or "weights"
    start: float  # seconds since the step's first computation
    stop: float


class Timeline(TypedDict):
    """What each rank of a pipeline computes when in its last step."""

    sizes: list[int]  # of stages, in layers
    events: list[Event]  # lists in JSON


class Pairs(NamedTuple):
    """Images (B, C, H, W) with one-hot labels (B, classes)."""

    images: Tensor
    targets: Tensor


class Noise:
    """Loads one batch of noise `steps` times; `input_shape` is an image's, (C, H, W).

    The tutorial draws new batches. That takes no time on a device.
    """

    def __init__(self, batch_size: int, input_shape: Sequence[int], num_classes: int, steps: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(num_classes, (batch_size,), generator=generator)
        images = torch.randn(batch_size, *input_shape, generator=generator)
        self.batch, self.steps = Pairs(images, F.one_hot(labels, num_classes).float()), steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Pairs]:
        return iter([self.batch] * self.steps)


class Task(LightningModule):
    """Trains the outputs of a net, the composition of `layers`, to be one-hot labels, by mean squared error and SGD.

    One device cuts a batch into `num_microbatches`; a pipeline strategy cuts by itself.
    """

    def __init__(self, layers: Sequence[nn.Module], num_microbatches: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.num_microbatches = num_microbatches
        self.automatic_optimization = num_microbatches == 1  # else the step does backward

    def forward(self, images: Tensor) -> Tensor:
        """Compute outputs (B, classes) of images (B, C, H, W)."""
        x: Any = images
        for layer in self.layers:
            x = layer(*x) if isinstance(x, tuple) else layer(x)
        return x

    def training_step(self, batch: Pairs, batch_idx: int) -> Tensor | None:
        """Return the loss; for micro-batches take the step and return None."""
        if self.automatic_optimization:
            return self.pipeline_loss(self(batch.images), batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        pieces = (x.tensor_split(self.num_microbatches) for x in batch)
        for piece in map(Pairs, *pieces):
            loss = self.pipeline_loss(self(piece.images), piece)
            self.manual_backward(loss * (len(piece.images) / len(batch.images)))
        optimizer.step()
        return None

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), LEARNING_RATE)

    def pipeline_stages(self) -> list[nn.Module]:
        return list(self.layers)

    def pipeline_loss(self, output: Tensor, batch: Pairs) -> Tensor:
        """Compute the mean squared error on the device of the outputs."""
        return F.mse_loss(output, batch.targets.to(output.device))


@dataclass
class Bench:
    """Measures cases on one module and one batch."""

    make: Callable[[Case], LightningModule]  # makes the module of a case afresh
    loader: Callable[[int], Noise]  # makes the loader of so many batches
    batches: int  # steps that are timed together
    repeats: int  # how often

    def measure(self, case: Case) -> tuple[StepTiming, Timeline]:
        """Measure a case and return its row and its timeline; the study sets the row's speed-up."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            # The tutorial's ResNet has layers that train to other weights in a pipeline: it is only timed
            warnings.filterwarnings("ignore", ".*(BatchNorm sees|noise from torch's generator)", UserWarning)
            steps = _Steps(Path(folder), self.batches, self.repeats)
            trainer = case.trainer(callbacks=[steps, Lines(case.name)], **QUIET | {"max_steps": steps.steps})
            # Makes the module in the process that trains it, as it may be on GPUs
            fit_isolated(trainer, lambda: trainer.fit(self.make(case), self.loader(steps.steps)), threads=1)
            ranks = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(case.devices)]
        row: StepTiming = {
            "name": case.name,
            "schedule": case.schedule,
            "num_microbatches": case.num_microbatches,
            "seconds_per_step": [*map(max, zip(*(rank["seconds"] for rank in ranks), strict=True))],
            "speedup": 1.0,
            "bubble_bound": case.bubble_bound,
            "share_of_bound": None,
        }
        events = [Event(rank, *event) for rank, figures in enumerate(ranks) for event in figures["events"]]
        zero = min((event.start for event in events), default=0.0)
        events = [
            event._replace(start=round(event.start - zero, 7), stop=round(event.stop - zero, 7)) for event in events
        ]
        return row, {"sizes": ranks[0]["sizes"], "events": events}


class _Steps(Stoppable):
    """Times `repeats` blocks of `batches` steps; every rank writes `rank<r>.json` into the folder.

    The file has `seconds` a step of each block; for a pipeline also the `sizes` of stages, and the `events` of the last
    step as (stage, micro-batch, kind, start, stop).
    """

    def __init__(self, folder: Path, batches: int, repeats: int) -> None:
        self.folder, self.batches = folder, batches
        self.steps, self.step = WARMUP + batches * repeats, 0
        self._moments: list[float] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.strategy.root_device.type == "cpu":
            torch.set_num_threads(1)  # there may be as many ranks as cores

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.step += 1
        timed = self.step - WARMUP
        if timed >= 0 and timed % self.batches == 0:
            for device in {p.device for p in pl_module.parameters() if p.device.type == "cuda"}:
                torch.cuda.synchronize(device)
            self._moments.append(time.perf_counter())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy, seconds = trainer.strategy, [(stop - start) / self.batches for start, stop in pairwise(self._moments)]
        figures: dict[str, Any] = {"events": [], "sizes": [], "seconds": seconds}
        if isinstance(strategy, PipelineStrategy):
            figures |= {"events": strategy.events, "sizes": strategy.stage_sizes}
        write_json(self.folder / f"rank{trainer.global_rank}.json", figures)
