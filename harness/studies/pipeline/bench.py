"""Measures a row: a fit, timed inside its ranks."""

import json
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from harness.studies.hardware.bench import QUIET
from harness.studies.isolation import fitted
from harness.studies.pipeline.rows import Row
from harness.studies.pipeline.steps import Steps
from harness.studies.pipeline.task import Noise

WARMUP = 2  # steps: the first also allocates, chooses kernels and says what travels between stages
Facts = dict[str, Any]


@contextmanager
def timed_only() -> Iterator[None]:
    """Inside, a pipeline doesn't warn of layers that train to other weights in it; the tutorial's ResNet has them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*BatchNorm sees", UserWarning)
        warnings.filterwarnings("ignore", ".*noise from torch's generator", UserWarning)
        yield


class Bench:
    """Measures rows on one module and one batch.

    Args:
        make: makes the module of a row afresh.
        loader: makes what it is fitted on, of so many batches.
        batches: steps that are timed together.
        repeats: how often.
    """

    def __init__(
        self, make: Callable[[Row], LightningModule], loader: Callable[[int], Noise], batches: int, repeats: int
    ) -> None:
        self.make, self.loader, self.batches, self.repeats = make, loader, batches, repeats

    def measure(self, row: Row) -> tuple[Facts, Facts]:
        """What results.json has of a row, without comparisons; and what its picture needs.

        Raises:
            Exception: whatever the fit raised.
        """
        ranks = self._ranks(row)
        facts = {
            "name": row.name,
            "schedule": row.schedule,
            "num_microbatches": row.num_microbatches,
            "seconds_per_step": [max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True)],
        }
        events = [[number, *event] for number, rank in enumerate(ranks) for event in rank["events"]]
        start = min((event[-2] for event in events), default=0.0)
        for event in events:
            event[-2:] = (round(moment - start, 7) for moment in event[-2:])
        stages = sorted(stage for rank in ranks for stage in rank["layers"].values())
        return facts, {"sizes": [stages.count(stage) for stage in dict.fromkeys(stages)], "events": events}

    def _ranks(self, row: Row) -> list[Facts]:
        with tempfile.TemporaryDirectory() as folder, timed_only():
            steps = Steps(Path(folder), WARMUP, self.batches, self.repeats)
            trainer = row.trainer(callbacks=[steps], **QUIET | {"max_steps": steps.steps})
            fitted(trainer, partial(self._fit, trainer, row, steps.steps), threads=1)
            return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(row.devices)]

    def _fit(self, trainer: Trainer, row: Row, steps: int) -> None:
        """In the process of one device the module is made there, as it may lie on GPUs."""
        trainer.fit(self.make(row), self.loader(steps))
