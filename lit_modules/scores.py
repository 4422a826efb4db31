"""Evaluation scores, which count each sample once on any number of ranks."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from lit_modules.objectives.base import widened
from lit_modules.objectives.cross_entropy import cross_entropy

UNIT = 2.0**32


class ExactMean(Metric):
    """Mean of per-sample values, summed in integers: whole parts, and fractions in units of 2**-32.

    Each value is rounded to 2e-10; a value that is not finite or above 2**53 makes the mean NaN.
    """

    whole: Tensor
    fraction: Tensor
    samples: Tensor
    broken: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("whole", "fraction", "samples", "broken"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add b samples: values (b,)."""
        values = values.detach().double()
        usable = values.abs() <= 2.0**53
        values = values.where(usable, 0.0)
        floor = values.floor()
        self.whole += floor.long().sum()
        self.fraction += ((values - floor) * UNIT).round().long().sum()
        self.samples += len(values)
        self.broken += (~usable).sum()

    def compute(self) -> Tensor:
        """The mean, a float64 scalar."""
        mean = (self.whole.double() + self.fraction.double() / UNIT) / self.samples
        return mean.where(self.broken == 0, torch.nan)


class Scores(nn.Module):
    """The scores of one run."""

    names: tuple[str, ...]  # of the values in a test's result, the most important first

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add b samples: logits (b, ..., classes), labels (b, ...)."""
        raise NotImplementedError

    def compute(self) -> dict[str, Tensor]:
        """Values over all ranks, including those of `names`."""
        raise NotImplementedError

    def reset(self) -> None:
        """Start from zero."""
        for metric in self.children():
            metric.reset()  # type: ignore[operator]

    def per_sample(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        """Values (b,) by name, whose means training logs; `ce` are the cross-entropies (b,), if already computed."""
        raise NotImplementedError


MakeScores = Callable[[], Scores]


class ClassScores(Scores):
    """Scores of a classifier: loss, accuracy, and the confusion matrix (classes, classes) with the truth in rows."""

    names = ("acc", "correct")

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.confusion = MulticlassConfusionMatrix(num_classes, validate_args=False)
        self.loss = ExactMean()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add b samples: logits (b, classes), labels (b,)."""
        self.confusion.update(logits, labels)
        self.loss.update(cross_entropy(logits, labels))

    def compute(self) -> dict[str, Tensor]:
        """{"loss", "acc", "correct"} over all ranks."""
        confusion = self.confusion.compute()
        correct, samples = confusion.trace(), confusion.sum()
        return {"loss": self.loss.compute(), "acc": correct.double() / samples, "correct": correct.double()}

    def per_sample(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        """Accuracy: whether the largest logit is the label's."""
        return {"acc": logits.detach().argmax(1) == labels}


class TokenScores(Scores):
    """Scores of a language model: loss per token in nats, bits per character, perplexity; ignores labels of -100."""

    names = ("loss", "bpc", "perplexity")

    def __init__(self, tokens_per_character: float = 1.0) -> None:
        super().__init__()
        self.bits = tokens_per_character / math.log(2)  # per character, for a nat per token
        self.loss = ExactMean()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the tokens of b texts: logits (b, T, V), labels (b, T)."""
        losses = F.cross_entropy(widened(logits).flatten(0, 1), labels.flatten(), reduction="none")
        self.loss.update(losses[labels.flatten() >= 0])

    def compute(self) -> dict[str, Tensor]:
        """{"loss", "bpc", "perplexity"} over all ranks."""
        loss = self.loss.compute()
        return {"loss": loss, "bpc": loss * self.bits, "perplexity": loss.exp()}

    def per_sample(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        """Bits per character."""
        return {"bpc": (cross_entropy(logits, labels) if ce is None else ce).detach() * self.bits}
