"""What a batch of any loader has to be: inputs and a label for each logit's row, checked before it can do harm."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from apprentice import replicas
from apprentice.batch import HIDDEN, IGNORED, Batch
from apprentice.errors import BadInput, reason


class Range(NamedTuple):
    """The smallest and the largest label, but for IGNORED ones, and whether there are such."""

    low: int
    high: int
    ignored: bool


class ChecksBatches(LightningModule):
    """A module that refuses batches of any loader in one line, before they can do harm."""

    def __init__(self) -> None:
        super().__init__()
        self._label_range: Range | None = None  # of the current batch, if its labels are no longer on the CPU
        self._taken: set[tuple[tuple[int, ...], torch.dtype]] = set()  # shapes and types that the nets have taken

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Look at a batch after the hook of this name, while it is on the CPU and not yet cut in shards.

        Lightning's public hook is the data module's where that has one.
        """
        batch = super()._on_before_batch_transfer(batch, dataloader_idx)
        if self._trainer is not None and not self._trainer.predicting:
            self.look_at(batch)
        return batch

    def look_at(self, batch: Any) -> None:
        """Keep the range of labels that go to a GPU, where to read them would wait for all that it computes.

        A data module of ours has checked its own; what a hook changes on the GPU is not checked.
        """
        self._label_range = None
        if self.device.type == "cpu" or not is_pair(batch):
            return
        if not is_overridden("on_after_batch_transfer", getattr(self.trainer, "datamodule", None) or self):
            self._label_range = range_of(batch[1])

    @contextmanager
    def naming_inputs(self, inputs: Tensor) -> Iterator[None]:
        """Raise BadInput if nets fail inside on inputs of a shape and type that they have not taken before."""
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

    def check_labels(self, logits: Tensor, batch: Batch) -> None:
        """Raise BadInput if a label is no class of these logits (b, ..., classes)."""
        labels, of_texts = batch.labels, batch.labels.dim() > 1
        if labels.shape != logits.shape[:-1]:
            expected = f"{tuple(logits.shape[:-1])}, a whole number for each of the logits {tuple(logits.shape)}"
            raise BadInput("data", f"labels {tuple(labels.shape)}", expected)
        found = range_of(labels) if labels.device.type == "cpu" else self._label_range
        if found is None:
            return
        if of_texts and found.ignored and self.training and batch.label_weight is None:
            raise BadInput("data", f"labels of {IGNORED}", "a Batch with its label_weight, as some tokens do not count")
        lowest = HIDDEN if batch.label_weight is not None and not of_texts else 0
        if not lowest <= found.low <= found.high < logits.shape[-1] or (found.ignored and not of_texts):
            ignored = f", or {IGNORED} for a token that does not count" if of_texts else ""
            low = IGNORED if found.ignored and not of_texts else found.low
            expected = f"0 to {logits.shape[-1] - 1}, the classes{ignored}"
            raise BadInput("data", f"labels from {low} to {found.high}", expected)


def range_of(labels: Tensor) -> Range | None:
    """What labels there are; None if there is none."""
    if not labels.numel() or labels.is_floating_point():
        return None
    low, high = (int(x) for x in labels.aminmax())
    ignored = low == IGNORED
    if ignored and high > IGNORED:
        low = int(labels.where(labels != IGNORED, high).min())
    return Range(low, high, ignored) if high > IGNORED else Range(0, 0, ignored)


def checked(batch: Any) -> Any:
    """A `Batch`, or a plain pair of tensors of which labels are whole numbers; BadInput for another thing."""
    if isinstance(batch, Batch):
        return batch
    if not is_pair(batch):
        raise BadInput("data", _described(batch), "batches (inputs, labels), two tensors")
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


def _described(batch: object) -> str:
    if isinstance(batch, list | tuple):
        return f"a batch ({', '.join(type(x).__name__ for x in batch)})"
    keys = f" of {', '.join(map(str, batch))}" if isinstance(batch, dict) else ""
    return f"a batch that is a {type(batch).__name__}{keys}"
