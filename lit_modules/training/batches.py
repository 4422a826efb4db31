"""Batches from any loader: inputs and labels that the nets' logits can be compared with."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from apprentice import replicas
from apprentice.batch import IGNORED, Batch
from apprentice.errors import BadInput, reason
from lit_modules.tasks.base import Range, Task


class BatchReader:
    """Reads batches; raises BadInput for those that a module can't learn from, before they change its nets.

    Args:
        task: what a label is.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self._label_range: Range | None = None  # of the current batch, if its labels are no longer on the CPU
        self._label_weight: float | Tensor | None = None  # of the current batch, if it is a plain pair
        self._taken: set[tuple[tuple[int, ...], torch.dtype]] = set()  # shapes and types that the nets have taken

    def read(self, batch: Any, step: int) -> Batch:
        """Return a rank's rows of the global batch of a step."""
        whole = Batch.of(require_batch(batch), step)
        self._label_weight = whole.label_weight
        return whole

    def read_rows(self, batch: Any, step: int) -> Batch:
        """Return some of these rows, or all; a shard of a plain pair gets the whole pair's `label_weight`."""
        if isinstance(batch, Batch):
            return batch
        rows = Batch.of(require_batch(batch), step)
        return rows._replace(label_weight=self._label_weight) if replicas.is_shard() else rows

    def inspect(self, batch: Any, module: LightningModule) -> None:
        """Keep what labels say while they are on the CPU: to read them on a GPU would wait for all that it computes.

        Our data modules have checked their labels; labels that a hook changes on the GPU are not checked.
        """
        self._label_range = None
        if not is_pair(batch):
            return
        self._label_weight = Batch.of(batch, 0, shared=False).label_weight
        if module.device.type == "cpu":
            return
        if not is_overridden("on_after_batch_transfer", getattr(module.trainer, "datamodule", None) or module):
            self._label_range = range_of(batch[1])

    @contextmanager
    def naming_inputs(self, inputs: Tensor) -> Iterator[None]:
        """Turn an error in the block into BadInput if inputs of this shape and type come for the first time."""
        kind = tuple(inputs.shape[1:]), inputs.dtype
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError or kind in self._taken or replicas.count() > 1:
                raise  # of memory, of a lost connection, or what is no fault of the inputs
            shape, dtype = kind[0], str(kind[1]).removeprefix("torch.")
            expected = f"inputs that the nets take; they say: {reason(error)}"
            raise BadInput("data", f"inputs {shape} of {dtype}", expected) from error
        self._taken.add(kind)

    def check_labels(self, logits: Tensor, batch: Batch, training: bool) -> None:
        """Raise BadInput if a label is no class of these logits (b, ..., classes)."""
        labels = batch.labels
        if labels.shape != (shape := self.task.label_shape(logits)):
            expected = f"{shape}, a whole number for each of the logits {tuple(logits.shape)}"
            raise BadInput("data", f"labels {tuple(labels.shape)}", expected)
        label_range = range_of(labels) if labels.device.type == "cpu" else self._label_range
        if label_range is not None:
            self.task.check_labels(label_range, logits.shape[-1], batch.label_weight is not None, training)


def check_trained(trainer: Trainer) -> None:
    """Raise BadInput after a fit whose data have no batch."""
    if not trainer.num_training_batches and trainer.limit_train_batches:
        raise BadInput("data", "no training batch", "at least one; `drop_last` leaves out a batch that is not full")
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    if batches.completed and not batches.started:  # Lightning passes over a batch that is None
        raise BadInput("data", "no training batch", "batches (inputs, labels); each is None")


def range_of(labels: Tensor) -> Range | None:
    """The smallest and largest label; None without labels, or if they are no whole numbers."""
    if not labels.numel() or labels.is_floating_point():
        return None
    low, high = (int(x) for x in labels.aminmax())
    ignored = low == IGNORED
    if ignored and high > IGNORED:
        low = int(labels.where(labels != IGNORED, high).min())
    return Range(low, high, ignored) if high > IGNORED else Range(0, 0, ignored)


def require_batch(batch: Any) -> Any:
    """Return a `Batch`, or a plain pair (inputs, labels) with whole numbers as labels; BadInput for all else."""
    if isinstance(batch, Batch):
        return batch
    if not is_pair(batch):
        raise BadInput("data", _describe(batch), "batches (inputs, labels), two tensors")
    if batch[1].is_floating_point():
        dtype = str(batch[1].dtype).removeprefix("torch.")
        raise BadInput("data", f"labels of {dtype}", "classes as whole numbers")
    return batch


def is_pair(batch: Any) -> bool:
    """Whether it is a plain pair of tensors."""
    return (
        not isinstance(batch, Batch)
        and isinstance(batch, list | tuple)
        and len(batch) == 2
        and all(isinstance(x, Tensor) for x in batch)
    )


def _describe(batch: object) -> str:
    if isinstance(batch, list | tuple):
        return f"a batch ({', '.join(type(x).__name__ for x in batch)})"
    keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, dict) else ""
    return f"a batch that is a {type(batch).__name__}{keys}"
