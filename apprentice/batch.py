"""A rank's share of a global batch, with what a loss needs to be the same on any number of devices."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apprentice import replicas
from apprentice.errors import BadInput

HIDDEN = -1  # in place of a label that training must not see
IGNORED = -100  # in place of the label of a token that counts nowhere, as in torch's cross_entropy


def counted(labels: Tensor) -> Tensor:
    """Which labels count, those that are neither HIDDEN nor IGNORED."""
    return labels >= 0


class Partners(NamedTuple):
    """The samples that a batch's are to be mixed with, one for each."""

    inputs: Tensor  # (b, ...), as the batch's
    labels: Tensor  # (b,)
    index: Tensor  # type: ignore[assignment]  # (b,), their places in the data set


class Mixed(NamedTuple):
    """The second label of mixed samples, whose loss is `share` of that with the first and the rest with the second."""

    labels: Tensor  # (b,) int64
    share: Tensor  # (b,) of the first sample

    def mean(self, first: Tensor, second: Tensor) -> Tensor:
        """(b,) means of values for the first and the second labels."""
        return second + self.share.to(first.dtype) * (first - second)


class Batch(NamedTuple):
    """The b rows that this rank sees of a global batch of `count` rows; b may be 0."""

    inputs: Tensor  # (b, ...), such as uint8 images (b, C, H, W), their normalised floats, or token numbers (b, T)
    labels: Tensor  # (b,) int64, or (b, T) with a label for each token
    index: Tensor  # type: ignore[assignment]  # (b,) int64, each sample's place in its data set; shadows tuple.index
    rows: Tensor  # (b,) int64, each sample's row in the global batch
    count: int  # type: ignore[assignment]  # rows in the global batch
    replicas: int  # number of ranks that gradients are averaged over, without parameter servers
    step: int  # number of this global batch since training began
    # None if all labels count; else rows of the global batch for each label that does, times T of texts (b, T).
    label_weight: float | None = None
    mixed: Partners | Mixed | None = None  # what the samples are to be mixed with, or were

    @classmethod
    def of(cls, batch: "Batch | Sequence[Tensor]", step: int, shared: bool = True) -> "Batch":
        """The batch itself, or one made of a plain (inputs, labels) pair from any DataLoader.

        With `shared`, the pairs of all ranks form one global batch; otherwise each rank's pair is a batch of its own.
        Raises BadInput if the global batch has no rows.
        """
        if isinstance(batch, cls):
            return batch
        inputs, labels = batch  # type: ignore[misc]
        count, before, weight = _counts(labels, shared)
        if shared and not count:
            raise BadInput("data", "a batch of 0 rows", "at least one row on some rank")
        first, ranks = (replicas.first_row() + before, replicas.training_count()) if shared else (0, 1)
        rows = torch.arange(len(inputs), device=inputs.device) + first
        return cls(inputs, labels.long(), rows, rows, count, ranks, step, weight)

    def part(self, start: int, stop: int) -> "Batch":
        """The rows from `start` to `stop` as a batch of their own."""
        inputs, labels, index, rows = (tensor[start:stop] for tensor in self[:4])
        mixed = self.mixed and type(self.mixed)(*(tensor[start:stop] for tensor in self.mixed))
        return Batch(inputs, labels, index, rows, max(stop - start, 1), 1, self.step, self.label_weight, mixed)

    @property
    def share(self) -> float:
        """The weight of the mean over these rows: averaged over the ranks, weighted means give the global mean."""
        return len(self.labels) * self.replicas / self.count

    def mean(self, per_sample: Tensor) -> Tensor:
        """This rank's part of the global mean of a (b,) tensor; the average over the ranks is that mean, exactly."""
        return per_sample.sum() * (self.replicas / self.count)


def _counts(labels: Tensor, shared: bool) -> tuple[int, int, float | None]:
    """The rows of labels, of those of the ranks before this one, and the `label_weight` of texts (b, T).

    If `shared`, all ranks' labels count, otherwise this one's.
    """
    of_texts = labels.dim() > 1
    if not of_texts and (not shared or replicas.count() == 1):
        return len(labels), 0, None
    own = torch.tensor([len(labels), labels.shape[1] if of_texts else 1], device=labels.device)
    own = torch.stack([*own, counted(labels).sum() if of_texts else own[0]])
    rows, lengths, counting = (replicas.all_gather(own) if shared else own[None]).T.tolist()
    before, count = sum(rows[: replicas.rank()]) if shared else 0, sum(rows)
    used = {length for length, n in zip(lengths, rows, strict=True) if n}
    if not of_texts or (len(used) < 2 and sum(counting) == count * max(used, default=0)):
        return count, before, None
    return count, before, labels.shape[1] * count / max(sum(counting), 1)
