"""Epochs in which a sample comes several times: equal counts of classes, repeated augmentation."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from apprentice import keyed
from apprentice.errors import BadInput
from datamodules.loaders import EpochOrder


class ResampledOrder(EpochOrder):
    """A seeded order with the number of samples of a whole epoch, in which a sample may be absent or come again.

    Every draw depends on seed and epoch alone, so batches are the same on any number of ranks and after a resume.
    `indices` tells appearances of a sample apart, whose augmentation is drawn for each: place + n * earlier ones.

    Args:
        labels: (n,) int64.
        balanced: take equal counts of all classes, up to one. Samples of a class come again only when all of it have
            come, and those of a large class that are left out are others in each epoch.
        copies: repeated augmentation, as in DeiT's RASampler (Hoffer et al., "Augment Your Batch", 2020): a batch has
            so many times fewer samples, each so many times; so an epoch has a part of them. Copies of a batch are apart
            by its number of samples.
        batch_size: of the batches that are made of the order.
        options: those of EpochOrder.
    """

    def __init__(self, labels: Tensor, balanced: bool, copies: int, batch_size: int, *options: Any) -> None:
        super().__init__(len(labels), *options)
        self.labels, self.balanced, self.copies, self.batch_size = labels, balanced, copies, batch_size

    def indices(self) -> Tensor:
        """Return (n,) int64, the appearances of samples in the current epoch, in its order."""
        order = self._balanced_order() if self.balanced else super().indices()
        if self.copies > 1:
            order = repeat_in_batches(order, self.copies, self.batch_size)
        by_place = order.argsort(stable=True)
        counts = order[by_place].unique_consecutive(return_counts=True)[1]
        earlier = torch.empty_like(order)
        earlier[by_place] = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        return order + earlier * self.size

    def places(self, index: Tensor) -> Tensor:
        return index % self.size

    def _balanced_order(self) -> Tensor:
        classes, turn = self.labels.unique().tolist(), self._turn
        per_class, rest = divmod(self.size, len(classes))
        more = {*keyed.permutation(len(classes), self.seed, turn, 2)[:rest].tolist()}
        drawn = []
        for number, label in enumerate(classes):
            members, count = (self.labels == label).nonzero().flatten(), per_class + (number in more)
            rounds = range(-(-count // len(members)))
            order = [members[keyed.permutation(len(members), self.seed, turn, 3, label, again)] for again in rounds]
            drawn.append(torch.cat(order)[:count] if order else members[:0])
        return torch.cat(drawn)[keyed.permutation(self.size, self.seed, turn)]


def repeat_in_batches(order: Tensor, copies: int, batch_size: int) -> Tensor:
    """Return (n,), batches of the first of `order` (n,), each sample of a batch so many times."""
    batches, first = [], 0
    for size in [len(batch) for batch in order.split(batch_size)]:
        distinct = -(-size // copies)
        batches.append(order[first : first + distinct].repeat(copies)[:size])
        first += distinct
    return torch.cat(batches)


def balanced_weights(labels: Tensor, classes: int) -> Tensor:
    """Return (classes,) float64, weights by which each class that occurs in `labels` counts the same: n / (C n_c)."""
    counts = labels.bincount(minlength=classes)
    return len(labels) / (classes * counts.clamp(min=1).double())


def check_weights(weights: str | Sequence[float] | None, classes: int | None = None) -> None:
    """Raise BadInput for weights that are none of classes, or of another number of them."""
    expected = "balanced, or a list of numbers of 0 or more, one a class in the order of their names"
    if weights is None or weights == "balanced":
        return
    if isinstance(weights, str) or not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
        raise BadInput("data.class_weights", weights, f"{expected}, and some above 0")
    if classes is not None and len(weights) != classes:
        raise BadInput("data.class_weights", list(weights), f"{expected}; there are {classes} classes")


def flip_labels(labels: Tensor, train: Tensor, share: float, classes: int, key: int) -> Tensor:
    """Return a copy of labels (n,) in which this share of those at places `train` (k,) is another class, at random."""
    chosen = train[keyed.permutation(len(train), key)[: round(share * len(train))]]
    steps = 1 + keyed.bits(key, chosen)[:, 0] % (classes - 1)
    noisy = labels.clone()
    noisy[chosen] = (labels[chosen] + steps) % classes
    return noisy
