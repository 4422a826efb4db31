"""Texts made by a rule, to tell nets apart that read equally well: any number, of any length, from keys alone."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from apprentice import keyed
from apprentice.batch import IGNORED
from apprentice.errors import BadInput
from datamodules.data_hooks import LIMITS
from datamodules.loaders import TrainLoader
from datamodules.memory import available_bytes
from datamodules.splits import Split
from datamodules.text.base import TextData

DRAWN = 2**22  # random numbers that are drawn at once


class SyntheticTexts(TextData):
    """Texts that follow from seed, part and number, with labels at the places that the task is about.

    A sample is the same whatever the sizes of the parts. Labels are -100 where the text can't say what follows; each
    text has as many others. Nets are judged by how many of these they predict.

    Subclasses draw texts in `draw`, and say how many of a text's places have a label.

    Attributes:
        block_size: T, tokens of a text.
        vocab_size: V, numbers of tokens are below it.
        answers: labels of a text.
        drawn: random numbers that `draw` gets for a text.

    Args:
        block_size: T.
        vocab_size: V.
        batch_size: texts in a batch over all devices together, whatever their number.
        train_size: texts to train on.
        validation_size: texts to validate on; 0 for none.
        test_size: texts to test on.
        seed: of the texts.

    Raises:
        BadInput: a value can't be used, or the texts don't fit in memory.
    """

    labels_are_answers = True
    free_options: ClassVar[frozenset[str]] = frozenset()
    answers: int
    drawn: int

    def __init__(
        self,
        block_size: int = 64,
        vocab_size: int = 64,
        batch_size: int = 64,
        train_size: int = 20_000,
        validation_size: int = 500,
        test_size: int = 1_000,
        seed: int = 0,
    ) -> None:
        least = {"block_size": (block_size, 2), "vocab_size": (vocab_size, 3)}
        least |= {"train_size": (train_size, 1), "validation_size": (validation_size, 0), "test_size": (test_size, 1)}
        for name, (value, lowest) in least.items():
            if not isinstance(value, int) or value < lowest:
                raise BadInput(f"data.{name}", value, f"a whole number of at least {lowest}")
        super().__init__(
            batch_size, train_size=train_size, validation_size=validation_size, test_size=test_size, seed=seed
        )
        self._counts = dict(zip(LIMITS, (train_size, validation_size, test_size), strict=True))
        self.block_size, self._num_tokens = block_size, vocab_size
        self.input_shape, self.label_shape = (block_size,), (block_size,)

    @property
    def num_classes(self) -> int:
        return self._num_tokens

    def check_net(self, net: Any, whose: str, trained: bool = True) -> None:
        """Take any net but one that reads prompts: tokens stand for nothing."""
        self.check_prompts(net, whose)

    @property
    def label_weight(self) -> float:
        return self.block_size / self.answers

    def setup(self, stage: str | None = None) -> None:
        """Make the texts of all parts."""
        if self._splits:
            return
        total = sum(self._counts.values())
        needed = total * self.block_size * (8 + 4)
        if needed > available_bytes():
            expected = f"fewer texts: these {total:,} take {needed / 2**30:.1f} GiB"
            raise BadInput("data.train_size", self.train_size, expected)
        self._splits = {part: self._make(part, torch.arange(count)) for part, count in self._counts.items()}

    def _make(self, part: str, numbers: Tensor) -> Split:
        """Make the texts of a part with these numbers (n,), some at a time."""
        key = keyed.fold_in(self.seed, [*LIMITS].index(part))
        chunks = numbers.split(max(DRAWN // self.drawn, 1))
        texts = [self.draw(keyed.bits(key, chunk, self.drawn)) for chunk in chunks if len(chunk)]
        empty = torch.zeros(0, self.block_size, dtype=torch.int64)
        inputs = torch.cat([empty, *(text for text, _ in texts)]).int()
        return Split(inputs, torch.cat([empty, *(labels for _, labels in texts)]))

    def draw(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        """Return texts and labels (n, T) int64, given (n, drawn) int64 random numbers in [0, 2**32)."""
        raise NotImplementedError

    def train_dataloader(self) -> TrainLoader:
        loader = super().train_dataloader()
        loader.label_weight = self.label_weight
        return loader


def ignored_like(texts: Tensor) -> Tensor:
    """Return labels (n, T) int64 of texts none of whose places counts."""
    return torch.full_like(texts, IGNORED)


def choose(bits: Tensor, count: int) -> Tensor:
    """Return (n, count) different places of random numbers (n, m), all ways equally likely."""
    return bits.argsort(dim=1, stable=True)[:, :count]


def below(bits: Tensor, size: int) -> Tensor:
    """Return random numbers below `size`; `bits` are below 2**32, so that none is likelier than another by 2e-10 V."""
    return (bits * size) >> 32
