"""Measures a case: a fit for its figures, and one for its weights."""

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor

from apprentice.errors import BadInput
from harness.reports.report import Facts
from harness.runs import safepoints
from harness.studies.hardware.callbacks import KeepWeights, Measure, Phases
from harness.studies.hardware.cases import Case
from harness.studies.isolation import fit_isolated
from harness.studies.trainers import QUIET

PARITY_STEPS = 20
Weights = Mapping[str, Tensor]


@dataclass
class Bench:
    """Measures cases on one module and one data module.

    Raises:
        BadInput: there are too few batches for a step.
    """

    make: Callable[[bool], LightningModule]  # the module afresh; the argument: whether DataParallel wraps the net
    data: Any  # the data module, set up, with `batch_size` and `sizes`
    steps: int  # optimizer steps that are timed at least
    accumulate: int = 1  # batches a step
    threads: int = 1  # of a process that trains alone

    def __post_init__(self) -> None:
        rows, accumulate = self.data.sizes["train"], self.accumulate
        self.batch_rows = min(self.data.batch_size, rows)
        whole = rows // self.batch_rows  # batches that are not cut short
        self.limit = whole // accumulate * accumulate  # at an epoch's end a step would be taken with fewer
        if not self.limit:
            raise BadInput("trainer.accumulate_grad_batches", accumulate, f"at most {whole}, the whole batches there")
        self._references: dict[str, Weights] = {}

    def measure(self, case: Case) -> Facts:
        """The case's row, without the speed-up."""
        ranks, phases = self._ranks(case)
        seconds = max(statistics.median(rank["seconds"]) for rank in ranks) / phases.block
        sent = [rank["sent"] for rank in ranks]
        hidden = [rank["hidden"] for rank in ranks if rank["hidden"] is not None]
        return {
            "strategy": case.name,
            "devices": case.devices,
            "exact": case.exact,
            "images_per_second": self.batch_rows / seconds,
            "speedup": None,
            "step_ms": seconds * self.accumulate * 1e3,
            "state_bytes_per_rank": [rank["state"] for rank in ranks],
            "peak_memory_per_rank": [rank["peak"] for rank in ranks],
            "bytes_sent_per_step": None if None in sent else statistics.mean(sent) * self.accumulate / phases.timed,
            "hidden_share": statistics.mean(hidden) if hidden else None,
            "max_difference": self._difference(case),
            "threads_per_rank": ranks[0]["threads"],
        }

    def _ranks(self, case: Case) -> tuple[list[Facts], Phases]:
        phases = Phases.of(case.options, self.steps, self.accumulate)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"rank{rank}.json" for rank in range(1 if case.split else case.devices)]
            steps = phases.batches // self.accumulate
            self._fit(case, Measure(Path(folder), phases), files, steps, limit_train_batches=self.limit)
            return [json.loads(file.read_text()) for file in files], phases

    def _difference(self, case: Case) -> float | int:
        weights, reference = self._weights(case), case.reference
        if reference is None:
            self._references[case.name] = weights
            return 0.0
        if reference.name not in self._references:
            self._references[reference.name] = self._weights(reference)
        return difference(weights, self._references[reference.name], in_bits=case.exact is not None)

    def _weights(self, case: Case) -> Weights:
        """After some steps, in the precision in which a case is compared."""
        precision = "64-true" if case.exact is None else "32-true"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "weights.pt"
            self._fit(case, KeepWeights(file, PARITY_STEPS), [file], PARITY_STEPS, precision=precision)
            weights: Weights = safepoints.read(file)
        return {name.replace("net.module.", "net.", 1) if case.split else name: x for name, x in weights.items()}

    def _fit(self, case: Case, callback: Callback, files: Iterable[Path], steps: int, **settings: Any) -> None:
        trainer = case.trainer(callbacks=[callback], **QUIET | settings | {"max_steps": steps})
        fit_isolated(trainer, partial(trainer.fit, self.make(case.split), self.data), self.threads)
        if not all(file.exists() for file in files):
            expected = f"settings that train the net for {steps} steps; its loss is not finite"
            raise BadInput("optimizer", "(as given)", expected)


def difference(weights: Weights, others: Weights, in_bits: bool = False) -> float | int:
    """The largest absolute difference between two numbers of one net's weights, NaN if any is; or the bits that differ.

    Raises:
        ValueError: the weights are of two nets.
    """
    if {name: x.shape for name, x in weights.items()} != {name: x.shape for name, x in others.items()}:
        raise ValueError("expected the weights of one net twice")
    pairs = [(x.flatten(), others[name].flatten()) for name, x in weights.items() if x.numel()]
    if in_bits:
        changed = [x.view(torch.uint8) ^ y.view(torch.uint8) for x, y in pairs]
        return sum(int(np.bitwise_count(x.numpy()).sum()) for x in changed)
    return torch.stack([(x.double() - y.double()).abs().max() for x, y in pairs]).max().item()
