"""The base of data whose labels are classes: how much each class counts, and labels that are wrong on purpose."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor

from apprentice import keyed
from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from datamodules.loaders import EpochOrder
from datamodules.resampling import ResampledOrder, balanced_weights, check_weights, flip_labels
from datamodules.splits import LISTED, Source, Split


class ClassData(InMemoryData):
    """Samples with one class each.

    Attributes:
        copies: how often a sample comes in a batch that has it; see `ResampledOrder`.

    Args:
        batch_size: samples in a batch over all devices together, whatever their number.
        balanced: in each epoch of training take equal counts of all classes: samples of small classes come again, and
            of large ones other samples are left out in each epoch. The number of samples and batches stays.
        class_weights: of the cross-entropies of teacher and students in training: `balanced`, by which each class
            counts the same, or a list of numbers in the order of the classes. A batch's mean is the weighted one over
            all devices.
        label_noise: fraction of the training labels to replace by another class, drawn from `seed`; labels of other
            samples stay. With `labelled`, it is a fraction of all labels; a line says how many of the known ones are
            wrong.
        options: those of InMemoryData.
    """

    training_options = InMemoryData.training_options | {"balanced", "class_weights"}
    copies: int = 1

    def __init__(
        self,
        batch_size: int = 128,
        *,
        balanced: bool = False,
        class_weights: Literal["balanced"] | list[float] | None = None,
        label_noise: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(batch_size, **options)
        check_weights(class_weights)
        if label_noise is not None and not 0 <= label_noise < 1:
            raise BadInput("data.label_noise", label_noise, "a fraction (0.0 <= f < 1.0)")
        if balanced and self.labelled is not None:
            raise BadInput(
                "data.balanced", "true", "--data.labelled null beside it: the class of some samples is hidden"
            )
        self.balanced, self.class_weights, self.label_noise = balanced, class_weights, label_noise
        self._check_partition("balanced", balanced)

    def _check_partition(self, flag: str, value: object) -> None:
        if value and self.partition is not None:
            raise BadInput(
                f"data.{flag}", str(value).lower(), "--data.partition left out, by which a device has others"
            )

    def setup(self, stage: str | None = None) -> None:
        """Read the data as InMemoryData does; then say how classes are weighted."""
        if self._splits:
            return
        super().setup(stage)
        check_weights(self.class_weights, self.num_classes)
        if self.class_weights is not None:
            labels = self.split("train").labels
            self._say_weights("weights of classes", labels)
            if self._labelled_samples is not None and self.class_weights == "balanced":
                known = labels[self._labelled_samples]
                self._say_weights(f"of students, by the {len(known):,} labels that they know", known)

    def _say_weights(self, what: str, labels: Tensor) -> None:
        weights = self._weights(labels).tolist()
        pairs = [f"{name} {weight:.3g}" for name, weight in zip(self.class_names, weights, strict=True)]
        self.say(f"{what}: {', '.join(pairs[:LISTED])}{', ...' if len(pairs) > LISTED else ''}")

    def relabel(self, source: Source, train: Tensor) -> Source:
        """Return the source with noise in the labels at places `train` (k,); say how many are wrong."""
        if not self.label_noise:
            return source
        labels = flip_labels(source.labels, train, self.label_noise, self.num_classes, keyed.fold_in(self.seed, 8))
        changed = (labels != source.labels)[train]
        told = f"label noise: {int(changed.sum()):,} of {len(train):,} training labels are another class"
        if self._labelled_samples is not None:
            known = changed[self._labelled_samples]
            told += f", {int(known.sum()):,} of the {len(known):,} that students know"
        self.say(f"{told}, by --data.seed {self.seed}")
        return (
            source._replace(labels=labels) if isinstance(source, Split) else replace(cast("Any", source), labels=labels)
        )

    def _order(self, size: int) -> EpochOrder:
        if not self.balanced and self.copies == 1:
            return super()._order(size)
        labels = self.split("train").labels.cpu()
        return ResampledOrder(labels, self.balanced, self.copies, self.batch_size, *self._order_options)

    def _weights(self, labels: Tensor) -> Tensor:
        """(classes,) float64."""
        if self.class_weights == "balanced":
            return balanced_weights(labels.cpu(), self.num_classes)
        return torch.tensor(cast("Sequence[float]", self.class_weights), dtype=torch.float64)

    def weights_of_classes(self, labels: Tensor) -> Tensor | None:
        return None if self.class_weights is None else self._weights(labels)
