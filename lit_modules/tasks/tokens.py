"""A label for each token of a text: the token that follows."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from apprentice.batch import IGNORED, Batch, label_mask
from apprentice.errors import BadInput
from lit_modules.objectives.base import cross_entropy
from lit_modules.tasks.base import TEXTS, TOKENS, Metric, Range, Task, check_classes
from lit_modules.tasks.scores import PARTS, TEST, TRAIN, ByPart, ExactMean, Scored, Scores, TokenValues

OF_PARTS = "test_loss_window", "test_loss_linear"  # where attention has two parts, of one alone
BITS = Metric(
    name="test_bpc", tested=("test_bpc", "test_loss"), columns={"test_loss": "test loss", "test_bpc": "bits per char"},
    word="bits per character", title="test bits per character", chart="validation, bits a character",
    unit="bits", higher_is_better=False, beside=OF_PARTS,
    scale=1.0, digits=3, counted="tokens", limits=(0.0, float("inf")), of_samples="test_sample_bpc",
)  # fmt: skip
BYTES = replace(
    BITS, name="test_bpb", tested=("test_bpb", "test_loss"),
    columns={"test_loss": "loss a token", "test_bpb": "bits per byte"},
    beside=("test_agreement", "test_generated", *OF_PARTS),
    word="bits per byte", title="test bits per byte", chart="validation, bits a byte", counted="conversations",
    drawn="prompts", of_samples="test_sample_bpb",
)  # fmt: skip

ANSWERS = replace(
    BITS, name="test_answers", tested=("test_answers", "test_loss"),
    columns={"test_answers": "right answers, %"},
    word="right answers", title="right answers in the test, %", chart="validation, right answers", unit="points",
    higher_is_better=True, scale=100.0, digits=2, counted="texts", limits=(0.0, 100.0),
    of_samples="test_sample_answers",
)  # fmt: skip


class Tokens(Task):
    """Texts with a label for each of their T tokens, -100 for one that does not count; nets give logits (b, T, V).

    Args:
        tokens_per_character: of the text that is scored, or of each part of the data by its name (`train`,
            `validation`, `test`); 1 if tokens are characters.
        tokens_per_byte: in its place, of responses that are judged by bits per byte.
        answers: whether the labels that count are answers, and how many are right judges a net.
    """

    metrics: ClassVar[Mapping[str, Metric]] = MappingProxyType({"bits": BITS, "bytes": BYTES, "answers": ANSWERS})
    weight = "tokens"
    parts = "lit_modules.text.parts.TextParts"

    def __init__(
        self, tokens_per_character: ByPart = 1.0, tokens_per_byte: ByPart | None = None, answers: bool = False
    ) -> None:
        super().__init__()
        self.answers = answers
        self.metric = ANSWERS if answers else BITS if tokens_per_byte is None else BYTES
        self.tokens_per_unit = tokens_per_character if tokens_per_byte is None else tokens_per_byte

    @classmethod
    def of_data(cls, data: Any, metric: str | None = None) -> "Tokens":
        """The task of a data module with such attributes; BadInput for a metric, as there is no choice."""
        task = cls(**data.task_arguments)
        if metric is not None:
            expected = f"not allowed with `data {data.name}`, which is judged by {task.metric.word}"
            raise BadInput("metric", metric, expected)
        return task

    @property
    def has_chunks(self) -> bool:
        """Whether values of single tokens do for scores, so that the logits of a large vocabulary are not all held."""
        return not self.answers

    def scores(self) -> "Scores":
        if self.answers:
            return AnswerScores()
        return TokenScores(self.tokens_per_unit, self.metric.score)

    def check_labels(self, labels: Range, classes: int, weighted: bool, training: bool) -> None:
        """Raise BadInput if labels are no classes, or if training does not know how many of them count."""
        if labels.ignored and training and not weighted:
            raise BadInput("data", f"labels of {IGNORED}", "a Batch with its label_weight, as some tokens do not count")
        check_classes(labels, 0, classes, f", or {IGNORED} for a token that does not count")

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        """The tokens that count in each row, (b,), or its texts if these count alike; its texts if they are packed."""
        counts, texts = {}, batch.labels.new_ones(batch.labels.shape[:1])
        if batch.starts is not None and batch.texts is not None:
            places = torch.arange(batch.starts.shape[1], device=batch.starts.device)
            texts = ((batch.starts == places) & (batch.texts >= 0)).sum(1)
            counts[TEXTS] = texts
        if batch.label_weight is None:
            return {TOKENS: batch.labels.new_full(batch.labels.shape[:1], batch.labels.shape[1])}
        tokens = texts if isinstance(batch.label_weight, Tensor) else label_mask(batch.labels).sum(1)
        return {TOKENS: tokens, **counts}

    def keep_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The bits per character of each text that has a token that counts.

        Of responses, the bits of each `unit`, such as a prompt, divided by the mean of their sizes in bytes, and the
        `weights` of units, their bytes: the mean of the former is the metric.
        """
        score = self.metric.score
        if "unit" not in values:
            return {f"sample_{score}": values[score][values["tokens"] > 0]}
        bits = values[score] * values["tokens"] / _by_part(self.tokens_per_unit)[TEST]
        _, first, unit = np.unique(values["unit"], return_index=True, return_inverse=True)
        order = first.argsort()  # of units by their first sample
        bits, sizes = (np.bincount(unit, x)[order] for x in (bits, values["size"]))
        return {f"sample_{score}": bits / max(sizes.mean(), 1.0), "weights": sizes.astype(np.int64)}


class TokenScores(Scores):
    """Scores of a language model: loss per token in nats, bits per character, perplexity; ignores labels of -100.

    `name` is that of the second: `bpc`, or `bpb` for bits per byte. `tokens_per_unit` of these are in each part of the
    data: the text of one may have more bytes a token than that of another.
    """

    def __init__(self, tokens_per_unit: ByPart = 1.0, name: str = "bpc") -> None:
        super().__init__()
        self.bits = {part: rate / math.log(2) for part, rate in _by_part(tokens_per_unit).items()}  # a nat per token
        self.name = name
        self.names, self.trained, self.sampled = ("loss", name, "perplexity"), (name,), (name, "tokens")
        self.loss = ExactMean()

    def update(self, logits: Scored, labels: Tensor) -> None:
        self.loss.update(_losses(logits, labels)[label_mask(labels)])

    def compute(self) -> dict[str, Tensor]:
        loss = self.loss.compute()
        return {"loss": loss, self.name: loss * self.bits[self.part], "perplexity": loss.exp()}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {self.name: (cross_entropy(logits, labels) if ce is None else ce).detach() * self.bits[TRAIN]}

    def of_sample(self, logits: Scored, labels: Tensor) -> dict[str, Tensor]:
        """Bits per character, a mean over the tokens that count, and their number."""
        tokens = label_mask(labels).sum(1)
        bits = (_losses(logits, labels) * self.bits[TEST]).where(label_mask(labels), 0.0)
        return {self.name: bits.sum(1) / tokens.clamp(min=1), "tokens": tokens}


class AnswerScores(Scores):
    """Of the tokens that count, how many are the likeliest by the logits, and their mean loss in nats."""

    names, trained, sampled = ("answers", "loss"), ("answers",), ("answers", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.right, self.loss = ExactMean(), ExactMean()

    def update(self, logits: Scored, labels: Tensor) -> None:
        known = label_mask(labels)
        self.right.update(self.per_label(_whole(logits), labels)["answers"][known])
        self.loss.update(_losses(logits, labels)[known])

    def compute(self) -> dict[str, Tensor]:
        return {"answers": self.right.compute(), "loss": self.loss.compute()}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {"answers": (logits.argmax(-1) == labels).float()}

    def of_sample(self, logits: Scored, labels: Tensor) -> dict[str, Tensor]:
        """The share of right answers, and the number of tokens that count."""
        known = label_mask(labels)
        right = (self.per_label(_whole(logits), labels)["answers"] * known).sum(1)
        return {"answers": right / known.sum(1).clamp(min=1), "tokens": known.sum(1)}


def _by_part(value: ByPart) -> Mapping[str, float]:
    return value if isinstance(value, Mapping) else dict.fromkeys(PARTS, value)


def _whole(logits: Scored) -> Tensor:
    assert isinstance(logits, Tensor), "Tokens.has_chunks says that these scores need logits"
    return logits


def _losses(logits: Scored, labels: Tensor) -> Tensor:
    return logits.ce if isinstance(logits, TokenValues) else cross_entropy(_whole(logits), labels).detach()
