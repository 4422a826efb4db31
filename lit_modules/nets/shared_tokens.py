"""A model that is asked in the tokens of another tokenizer: both differ in added tokens alone, such as special ones."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class SharedTokens(NamedTuple):
    """The numbers that a model has for another tokenizer's tokens: of those with the same text in both.

    Logits of tokens that the model lacks are -inf, so that they are nobody's: the shared tokens' probabilities sum
    to 1.
    """

    numbers: Tensor  # (V,) int64, of each token of the other tokenizer; -1 where the model has none

    @classmethod
    def match(
        cls, size: int, ours: Mapping[str, int], theirs: Mapping[str, int], added: Collection[str],
        ends: tuple[str, str] | None = None,
    ) -> "SharedTokens | None":  # fmt: skip
        """Match tokens by their texts; None if the vocabularies differ in more than added tokens.

        Args:
            size: V, numbers of our tokens are below it.
            ours: numbers by text.
            theirs: the model's, likewise.
            added: texts of tokens that were added to either vocabulary.
            ends: the texts of the tokens that end a text in ours and in theirs, which are one token if neither has the
                other's.
        """
        if not ours.keys() ^ theirs.keys() <= {*added}:
            return None
        numbers = torch.full((size,), -1)
        for text, number in ours.items():
            numbers[number] = theirs.get(text, -1)
        if ends is not None and ends[0] not in theirs and ends[1] not in ours:
            numbers[ours[ends[0]]] = theirs[ends[1]]
        return cls(numbers)

    @property
    def absent(self) -> Tensor:
        """(n,) int64, those of our tokens that the model lacks."""
        return (self.numbers < 0).nonzero().flatten()

    @property
    def keeps_numbers(self) -> bool:
        """Whether all shared tokens have the same numbers in both."""
        numbers = torch.arange(len(self.numbers))
        return torch.equal(self.numbers, numbers.where(self.numbers >= 0, -1))

    def read(self, tokens: Tensor) -> Tensor:
        """Return the model's numbers of tokens (b, T); of those that it lacks, which no text has, that of another."""
        return self.numbers.to(tokens.device)[tokens.long()].clamp(min=0)

    def order(self, logits: Tensor) -> Tensor:
        """Return logits (..., V) of our tokens, of the model's (..., rows): a view if these are its first ones."""
        if self.keeps_numbers and not len(self.absent):
            return logits[..., : len(self.numbers)]
        numbers = self.numbers.to(logits.device)
        return logits[..., numbers.clamp(min=0)].masked_fill_(numbers < 0, -torch.inf)

    def kept(self) -> Tensor:
        """(n,) int64, the model's numbers of the shared tokens."""
        return self.numbers[self.numbers >= 0]


def mass_outside(logits: Tensor, kept: Tensor) -> Tensor:
    """Return (...), the probability of all tokens but those that are kept (n,), of logits (..., rows), in float64."""
    rest = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
    rest[kept.to(logits.device)] = False
    z = logits.double()
    return (z[..., rest].logsumexp(-1) - z.logsumexp(-1)).exp()
