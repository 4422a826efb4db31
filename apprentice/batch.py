"""A rank's rows of a global batch, and the counts by which losses are the same on any number of devices."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from apprentice import replicas
from apprentice.errors import BadInput

HIDDEN = -1  # in place of a label that training must not see
IGNORED = -100  # in place of the label of a token that counts nowhere, as in torch's cross_entropy


def label_mask(labels: Tensor) -> Tensor:
    """Return which labels count: those that are neither HIDDEN nor IGNORED."""
    return labels >= 0


class Partners(NamedTuple):
    """The samples that the rows of a batch are mixed with, one a row."""

    inputs: Tensor  # (b, ...), as the batch's
    labels: Tensor  # (b,)
    index: Tensor  # type: ignore[assignment]  # (b,), their places in the data set


class Mixed(NamedTuple):
    """Second labels of mixed samples: the loss is `share` of that with the first label, the rest with the second."""

    labels: Tensor  # (b,) int64
    share: Tensor  # (b,) of the first sample

    def mean(self, first: Tensor, second: Tensor) -> Tensor:
        """Return (b,), the weighted means of values for the first and the second labels."""
        return second + self.share.to(first.dtype) * (first - second)


class Batch(NamedTuple):
    """The b rows of a global batch of `count` rows that this rank computes; b may be 0."""

    inputs: Tensor  # (b, ...), such as uint8 images (b, C, H, W), their normalised floats, or token numbers (b, T)
    labels: Tensor  # (b,) int64, (b, T) with a label for each token, or floats (b, C), NaN where one is unknown
    index: Tensor  # type: ignore[assignment]  # (b,) int64, each sample's place in its data set; shadows tuple.index
    rows: Tensor  # (b,) int64, each sample's row in the global batch
    count: int  # type: ignore[assignment]  # rows in the global batch
    replicas: int  # number of ranks that gradients are averaged over, without parameter servers
    step: int  # number of this global batch since training began
    # None if all labels count; else rows of the global batch for each label that does, times T of texts (b, T). Where
    # texts count alike whatever their lengths, (b, T): rows for each text, times T / the text's labels that count.
    label_weight: float | Tensor | None = None
    mixed: Partners | Mixed | None = None  # partners before mixing, second labels after it
    # (classes,) float64, weights of cross-entropies by their label, whose mean over the global batch's labels is 1.
    class_weights: Tensor | None = None
    # Of rows with several texts each, for each token (b, T) int64: the place in its row where its text begins, and the
    # text's place in its data set, -1 where a row is filled up. `index` has the place of each row's first text.
    starts: Tensor | None = None
    texts: Tensor | None = None
    is_written: bool = False  # whether responses are a student's own, not the data's

    @classmethod
    def of(cls, batch: "Batch | Sequence[Tensor]", step: int, shared: bool = True) -> "Batch":
        """Return a Batch as it is, or make one of an (inputs, labels) pair from any DataLoader.

        With `shared`, the pairs of all ranks form one global batch; otherwise each rank's pair is a batch of its own.

        Raises:
            BadInput: the global batch has no rows.
        """
        if isinstance(batch, Batch):
            return batch
        inputs, labels = batch
        count, before, weight = _count_rows(labels, shared)
        if shared and not count:
            raise BadInput("data", "a batch of 0 rows", "at least one row on some rank")
        first, ranks = (replicas.first_row() + before, replicas.training_count()) if shared else (0, 1)
        rows = torch.arange(len(inputs), device=inputs.device) + first
        labels = labels if labels.is_floating_point() else labels.long()
        return cls(inputs, labels, rows, rows, count, ranks, step, weight)

    def part(self, start: int, stop: int) -> "Batch":
        """Return the rows from `start` to `stop` as a batch by themselves."""
        inputs, labels, index, rows = (tensor[start:stop] for tensor in self[:4])
        mixed = self.mixed and type(self.mixed)(*(tensor[start:stop] for tensor in self.mixed))
        starts, texts = (None if x is None else x[start:stop] for x in (self.starts, self.texts))
        weight = self.label_weight[start:stop] if isinstance(self.label_weight, Tensor) else self.label_weight
        return self._replace(
            inputs=inputs, labels=labels, index=index, rows=rows, count=max(stop - start, 1), replicas=1, mixed=mixed,
            label_weight=weight, starts=starts, texts=texts,
        )  # fmt: skip

    @property
    def share(self) -> float:
        """The weight of this rank's mean: the average over the ranks of weighted means is the global mean."""
        return len(self.labels) * self.replicas / self.count

    def mean(self, per_sample: Tensor) -> Tensor:
        """Return this rank's part of the global mean of a (b,) tensor: the average over the ranks is that mean."""
        return per_sample.sum() * (self.replicas / self.count)


def _count_rows(labels: Tensor, shared: bool) -> tuple[int, int, float | None]:
    """Count the rows of all ranks and those of the ranks before this one; return also the `label_weight` of texts.

    Unless `shared`, the rows of this rank alone count.
    """
    of_texts = labels.dim() > 1 and not labels.is_floating_point()
    if not of_texts and (not shared or replicas.count() == 1):
        return len(labels), 0, None
    sizes = torch.tensor([len(labels), labels.shape[1] if of_texts else 1], device=labels.device)
    sizes = torch.stack([*sizes, label_mask(labels).sum() if of_texts else sizes[0]])
    rows, lengths, counting = (replicas.all_gather(sizes) if shared else sizes[None]).T.tolist()
    before, count = sum(rows[: replicas.rank()]) if shared else 0, sum(rows)
    used = {length for length, n in zip(lengths, rows, strict=True) if n}
    if not of_texts or (len(used) < 2 and sum(counting) == count * max(used, default=0)):
        return count, before, None
    return count, before, labels.shape[1] * count / max(sum(counting), 1)
