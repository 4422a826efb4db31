"""Copying: random tokens, a mark, and the same tokens again."""

from typing import Any

import torch
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.text.synthetic import SyntheticTexts, below, ignored_like


class Copying(SyntheticTexts):
    """T / 2 random tokens, token 0, and the same tokens (Jelassi et al. 2024, 2402.01032); from the mark on all count.

    Tokens are from 1 to V - 1. The last token of the copy is a label only. A state of constant size holds so many.

    Args:
        block_size: T, even.
        vocab_size: V.
        options: those of `SyntheticTexts`.

    Raises:
        BadInput: a value can't be used, or the texts don't fit in memory.
    """

    def __init__(self, block_size: int = 64, vocab_size: int = 32, **options: Any) -> None:
        super().__init__(block_size, vocab_size, **options)
        if block_size % 2:
            raise BadInput("data.block_size", block_size, "an even number: half of it is copied")
        self.answers = self.drawn = block_size // 2

    def draw(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        tokens = below(bits, self.vocab_size - 1) + 1  # (n, T / 2)
        mark = torch.zeros(len(bits), 1, dtype=torch.int64)
        return torch.cat([tokens, mark, tokens[:, :-1]], 1), torch.cat([ignored_like(tokens), tokens], 1)
