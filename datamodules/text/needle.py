"""Needle: one pair somewhere in a long text, asked for at its end."""

from typing import Any

from torch import Tensor

from apprentice.errors import BadInput
from datamodules.text.synthetic import SyntheticTexts, below, ignored_like


class Needle(SyntheticTexts):
    """A text of random values with one key in it; the key again at its end, whose label is the token after the first.

    The key is a token from 1 to V / 2 - 1, values are from V / 2 on. Its first place is any but the last two, all
    equally likely.

    Args:
        block_size: T, at least 3.
        vocab_size: V, at least 4.
        options: those of `SyntheticTexts`.

    Raises:
        BadInput: a value can't be used, or the texts don't fit in memory.
    """

    answers = 1

    def __init__(self, block_size: int = 256, vocab_size: int = 64, **options: Any) -> None:
        super().__init__(block_size, vocab_size, **options)
        if block_size < 3:
            raise BadInput("data.block_size", block_size, "at least 3: a key, its value, and the key")
        if vocab_size < 4:
            raise BadInput("data.vocab_size", vocab_size, "at least 4: two values, and a key beside token 0")
        self.drawn = block_size + 2

    def draw(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        half = self.vocab_size // 2
        texts = below(bits[:, 2:], self.vocab_size - half) + half
        key, place = below(bits[:, :1], half - 1) + 1, below(bits[:, 1:2], self.block_size - 2)
        texts = texts.scatter(1, place, key)
        texts[:, -1:], labels = key, ignored_like(texts)
        labels[:, -1:] = texts.gather(1, place + 1)
        return texts, labels
