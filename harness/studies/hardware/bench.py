"""Measures a row: a fit for its figures, and one for its weights."""

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from apprentice.errors import BadInput
from harness.runs import safepoints
from harness.studies.hardware.callbacks import KeepWeights, Measure, Plan
from harness.studies.hardware.difference import differing_bits, largest_difference
from harness.studies.hardware.rows import Row
from harness.studies.isolation import fitted

Facts = dict[str, Any]
PARITY_STEPS = 20
QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "limit_val_batches": 0,
    "max_epochs": -1,
}  # fmt: skip


class Bench:
    """Measures rows on one module and one data module.

    Args:
        make: makes the module afresh; told whether to wrap its net in torch.nn.DataParallel.
        data: the data module, set up, with `batch_size` and `sizes`.
        steps: optimizer steps that are timed at least.
        accumulate: batches a step.
        threads: of a process that trains alone.

    Raises:
        BadInput: there are too few batches for a step.
    """

    def __init__(
        self, make: Callable[[bool], LightningModule], data: Any, steps: int, accumulate: int = 1, threads: int = 1
    ) -> None:
        self.make, self.data, self.steps, self.accumulate, self.threads = make, data, steps, accumulate, threads
        rows = data.sizes["train"]
        self.batch_rows = min(data.batch_size, rows)
        whole = rows // self.batch_rows  # batches that are not cut short
        self.limit = whole // accumulate * accumulate  # at an epoch's end a step would be taken with fewer
        if not self.limit:
            raise BadInput("trainer.accumulate_grad_batches", accumulate, f"at most {whole}, the whole batches there")
        self._references: dict[str, dict[str, Tensor]] = {}

    def measure(self, row: Row) -> Facts:
        """What results.json has of a row, but for the speed-up.

        Raises:
            Exception: whatever the fits raised; BadInput, where training stopped by itself.
        """
        return {**self.figures(row), "max_difference": self._difference(row)}

    def figures(self, row: Row) -> Facts:
        """The same without the difference to one process."""
        ranks, plan = self._ranks(row)
        seconds = max(statistics.median(rank["seconds"]) for rank in ranks) / plan.block
        sent = [rank["sent"] for rank in ranks]
        hidden = [rank["hidden"] for rank in ranks if rank["hidden"] is not None]
        return {
            "strategy": row.name,
            "devices": row.devices,
            "exact": row.exact,
            "images_per_second": self.batch_rows / seconds,
            "speedup": None,
            "step_ms": seconds * self.accumulate * 1e3,
            "state_bytes_per_rank": [rank["state"] for rank in ranks],
            "peak_memory_per_rank": [rank["peak"] for rank in ranks],
            "bytes_sent_per_step": None if None in sent else statistics.mean(sent) * self.accumulate / plan.timed,
            "hidden_share": statistics.mean(hidden) if hidden else None,
            "max_difference": None,
            "threads_per_rank": ranks[0]["threads"],
        }

    def _ranks(self, row: Row) -> tuple[list[Facts], Plan]:
        plan = Plan.of(row.options, self.steps, self.accumulate)
        with tempfile.TemporaryDirectory() as folder:
            steps = plan.batches // self.accumulate
            self._fit(row, Measure(Path(folder), plan), max_steps=steps, limit_train_batches=self.limit)
            files = [Path(folder) / f"rank{rank}.json" for rank in range(1 if row.split else row.devices)]
            if not all(file.exists() for file in files):
                raise _stopped(steps)
            return [json.loads(file.read_text()) for file in files], plan

    def _difference(self, row: Row) -> float | int:
        if row.reference is None:
            self._references[row.name] = self._weights(row)
            return 0.0
        if row.reference.name not in self._references:
            self._references[row.reference.name] = self._weights(row.reference)
        compare = largest_difference if row.exact is None else differing_bits
        return compare(self._weights(row), self._references[row.reference.name])

    def _weights(self, row: Row) -> dict[str, Tensor]:
        """After some steps, in the precision in which a row is compared."""
        precision = "64-true" if row.exact is None else "32-true"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights.pt"
            self._fit(row, KeepWeights(file, PARITY_STEPS), max_steps=PARITY_STEPS, precision=precision)
            if not file.exists():
                raise _stopped(PARITY_STEPS)
            weights: Mapping[str, Tensor] = safepoints.read(file)
        return {name.replace("net.module.", "net.", 1) if row.split else name: x for name, x in weights.items()}

    def _fit(self, row: Row, callback: Callback, **settings: Any) -> None:
        trainer = row.trainer(callbacks=[callback], **QUIET | settings)
        fitted(trainer, partial(trainer.fit, self.make(row.split), self.data), self.threads)


def _stopped(steps: int) -> BadInput:
    return BadInput("optimizer", "(as given)", f"settings that train the net for {steps} steps; its loss is not finite")
