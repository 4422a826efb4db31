"""Floating-point operations of a whole training on texts of many lengths, and on those that a student writes."""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch

from apprentice.batch import IGNORED, Batch
from harness.studies import training_flops as rows_alike
from harness.studies.operations import count_operations, flops
from harness.studies.training_flops import LearnedBatches
from lit_modules.distillation import Distillation
from lit_modules.text.on_policy import OnPolicyTexts
from lit_modules.training.loop import Loop

LENGTHS = 5  # of rows at which operations are counted
FEW = 2  # rows that are computed for that


def count_training(module: Loop, run: str, accumulated: int, batch: Batch, trained: LearnedBatches) -> int | None:
    """Count the operations of a run's training; `batch` is one of the data's, of which a step has `accumulated`.

    They are exact where rows have one length, or operations are quadratic in the length and linear in the labels that
    count, as those of softmax attention are. Texts that a student has written count as they were; writing them by what
    a token costs in this batch.

    None where an operator has no formula: see `count_operations`.
    """
    texts = next((extra for extra in module.extras if isinstance(extra, OnPolicyTexts)), None)
    written = np.array(texts.learned_texts.get(run, [0] * 4) if texts else [0] * 4, np.float64)
    lengths = trained.shapes.lengths
    if len(lengths.unique()) == 1 and not written.any():
        return rows_alike.count_training(module, run, batch, trained)
    steps = zip(trained.epochs.tolist(), (trained.numbers // accumulated).tolist(), strict=True)
    from_data = torch.tensor([texts is None or texts.learns_from_data(run, *step) for step in steps])
    rows = len(batch.inputs) if module.layout().relates_rows else FEW
    probes = [*cut_texts(batch, rows, int(lengths.max()))]
    of_probes = [module.timed_steps(run, probe) for probe in probes]
    phases, total = trained.phases(of_probes[0], module.batches_planned), 0.0
    for phase, start in enumerate(of_probes[0]):
        chosen = trained.shapes.select(from_data & (phases == phase))
        sizes = _sizes(*(column.double().numpy() for column in chosen[1:])).sum(0) + written * (phase == 0)
        if not sizes.any():
            continue
        counted = [flops(steps[start]) for steps in of_probes]
        if None in counted:
            return None
        total += float(sizes @ _fit(probes, np.array(counted, np.float64)))
    if texts is not None and written.any():
        new, distillation = list[Batch](), cast("Distillation", module)  # the only loop that holds such texts
        operations = count_operations(lambda: new.append(texts.timed_batch(distillation, run, batch)))
        if operations is None:
            return None
        total += operations * written[1] / new[0].inputs.numel()
    return trained.of_all_samples(total)


def cut_texts(batch: Batch, rows: int, longest: int) -> Iterator[Batch]:
    """Yield batches of a few rows and several lengths, all of whose labels count, and one of which half of them do."""
    lengths = np.unique(np.linspace(min(2, longest), longest, LENGTHS).round().astype(int)).tolist()
    repeated = batch.inputs[:rows].repeat(1, -(-longest // batch.inputs.shape[1]))
    for length, counted in [*((length, length) for length in lengths), (longest, -(-longest // 2))]:
        inputs = repeated[:, :length]
        labels = inputs.long().clone()
        labels[:, counted:] = IGNORED
        whole = {name: labels.new_zeros(inputs.shape) for name in ("starts", "texts") if batch.starts is not None}
        yield Batch(
            inputs, labels, batch.index[:rows], batch.rows[:rows], len(inputs), 1, 0, length / counted, is_written=True,
            **cast("Any", whole),
        )  # fmt: skip


def _sizes(rows: np.ndarray, lengths: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (n, 4), what operations of n batches are a sum of, as `lit_modules.text.text_batches.text_sizes`."""
    return np.stack([rows, rows * lengths, rows * lengths**2, labels], 1)


def _fit(probes: list[Batch], counted: np.ndarray) -> np.ndarray:
    """Return (4,), what each of the sizes costs, given batches and their operations (n,)."""
    shapes = [(len(x.inputs), x.inputs.shape[1], int((x.labels != IGNORED).sum())) for x in probes]
    sizes = _sizes(*np.array(shapes, np.float64).T)
    scale = np.abs(sizes).max(0)  # so that all are solved for with the same precision
    return np.linalg.lstsq(sizes / scale, counted, rcond=None)[0] / scale
