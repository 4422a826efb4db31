"""The base of data whose labels are classes: how much each class counts, and labels that are wrong on purpose."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from apprentice import keyed
from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from datamodules.loaders import TrainLoader
from datamodules.splits import LISTED, Source, Split


class ClassData(InMemoryData):
    """Samples with one class each.

    Args:
        batch_size: samples in a batch over all devices together, whatever their number.
        class_weights: of the cross-entropies of teacher and students in training: `balanced`, by which each class
            counts the same, or a list of numbers in the order of the classes. A batch's mean is the weighted one over
            all devices.
        label_noise: fraction of the training labels to replace by another class, drawn from `seed`; labels of other
            samples stay. With `labelled`, it is a fraction of all labels; a line says how many of those that
            students know are wrong.
        options: those of InMemoryData.
    """

    def __init__(
        self,
        batch_size: int = 128,
        *,
        class_weights: Literal["balanced"] | list[float] | None = None,
        label_noise: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        check_weights(class_weights)
        if label_noise is not None and not 0 <= label_noise < 1:
            raise BadInput("data.label_noise", label_noise, "a fraction (0.0 <= f < 1.0)")
        self.class_weights, self.label_noise = class_weights, label_noise
        self._is_wrong: Tensor | None = None  # of training samples, whether noise has changed the label
        self._said = set[str]()

    def setup(self, stage: str | None = None) -> None:
        """Read the data as InMemoryData does; then say how classes are weighted."""
        if self._splits:
            return
        super().setup(stage)
        check_weights(self.class_weights, self.num_classes)
        if self.class_weights is not None:
            self.say(f"weights of classes: {self._describe_weights(self.split('train').labels)}")

    def train_dataloader(self) -> TrainLoader:
        """As of InMemoryData; says once which weights and noise the labels have that a seed's students know."""
        known = self.labelled_samples() if self.hides_labels else None
        lines = [] if known is None else self._describe_known(known)
        for line in lines:
            if line not in self._said:
                self.say(line)
        self._said.update(lines)
        return super().train_dataloader()

    def _describe_known(self, known: Tensor) -> list[str]:
        """Say what is special about the training samples `known` (n,) bool, whose labels students have."""
        of = f"of the {int(known.sum()):,} labels that students know"
        of += f" with seed {self.order_seed}" if self.labelled_by == "seed" else ""
        lines = []
        if self.class_weights == "balanced":
            lines.append(f"weights {of}: {self._describe_weights(self.split('train').labels[known])}")
        if self._is_wrong is not None:
            lines.append(f"label noise: {int(self._is_wrong[known].sum()):,} {of} are another class")
        return lines

    def _describe_weights(self, labels: Tensor) -> str:
        weights = self._weights(labels).tolist()
        pairs = [f"{name} {weight:.3g}" for name, weight in zip(self.class_names, weights, strict=True)]
        return f"{', '.join(pairs[:LISTED])}{', ...' if len(pairs) > LISTED else ''}"

    def relabel(self, source: Source, train: Tensor) -> Source:
        """Return the source with noise in the labels at places `train` (k,); say how many are wrong."""
        if not self.label_noise:
            return source
        labels = flip_labels(source.labels, train, self.label_noise, self.num_classes, keyed.fold_in(self.seed, 8))
        self._is_wrong = (labels != source.labels)[train]
        wrong = f"{int(self._is_wrong.sum()):,} of {len(train):,} training labels are another class"
        self.say(f"label noise: {wrong}, drawn by seed {self.seed}")
        return (
            source._replace(labels=labels) if isinstance(source, Split) else replace(cast("Any", source), labels=labels)
        )

    def _weights(self, labels: Tensor) -> Tensor:
        """(classes,) float64."""
        if self.class_weights == "balanced":
            return balanced_weights(labels.cpu(), self.num_classes)
        return torch.tensor(cast("Sequence[float]", self.class_weights), dtype=torch.float64)

    def weights_of_classes(self, labels: Tensor) -> Tensor | None:
        return None if self.class_weights is None else self._weights(labels)


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
