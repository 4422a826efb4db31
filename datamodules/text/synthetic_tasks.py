"""Three tasks on synthetic texts: associative recall, copying, and a needle in a long text."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from apprentice.errors import BadInput
from datamodules.text.synthetic import SyntheticTexts, below, choose, ignored_like

Filler = Literal["zeros", "random"]


class Recall(SyntheticTexts):
    """Multi-query associative recall (MQAR, Arora et al. 2023, 2312.04927): what followed this key before?

    A text begins with N pairs of a key and a value; no key or value comes twice. Each key comes once more, at an even
    place after the pairs, where its label is its value. The n-th of those places is drawn by a weight of n^(power - 1),
    so most are near. Keys are tokens from 1 to V / 2 - 1, values from V / 2 on. Conventions are Zoology's.

    Args:
        block_size: T, even and at least 4 N.
        vocab_size: V.
        pairs: N.
        power: of the weights: 1 draws all places alike, above 0.
        filler: what other places hold: `zeros`, or `random` tokens, among them keys without a label.
        options: those of `SyntheticTexts`.

    Raises:
        BadInput: a value can't be used, or the texts don't fit in memory.
    """

    def __init__(
        self,
        block_size: int = 32,
        vocab_size: int = 64,
        pairs: int = 4,
        power: float = 0.01,
        filler: Filler = "zeros",
        **options: Any,
    ) -> None:
        super().__init__(block_size, vocab_size, **options)
        if not isinstance(pairs, int) or pairs < 1:
            raise BadInput("data.pairs", pairs, "a whole number of at least 1")
        if block_size % 2 or block_size < 4 * pairs:
            expected = f"an even number of at least {4 * pairs}, for {pairs} pairs and their keys again"
            raise BadInput("data.block_size", block_size, expected)
        if vocab_size // 2 <= pairs:
            raise BadInput("data.vocab_size", vocab_size, f"at least {2 * pairs + 2}, for {pairs} keys beside token 0")
        if not 0 < power < float("inf"):
            raise BadInput("data.power", power, "above 0")
        if filler not in get_args(Filler):
            raise BadInput("data.filler", filler, " or ".join(get_args(Filler)))
        self.pairs, self.power, self.filler = pairs, power, filler
        self.answers, self._places = pairs, block_size // 2 - pairs
        self.drawn = vocab_size - 1 + self._places + block_size * (filler == "random")

    def draw(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        half, first = self.vocab_size // 2, 2 * self.pairs
        sizes = [half - 1, self.vocab_size - half, self._places, bits.shape[1] - self.vocab_size + 1 - self._places]
        for_keys, for_values, for_places, for_rest = bits.split(sizes, 1)
        keys, values = choose(for_keys, self.pairs) + 1, choose(for_values, self.pairs) + half
        # The least of exponential times of rates w: places drawn one by one by their weights, none twice.
        weights = torch.arange(1, self._places + 1, dtype=torch.float64) ** (self.power - 1)
        times = -((for_places.double() + 0.5) / 2**32).log() / weights
        places = first + 2 * choose(times, self.pairs)
        texts = torch.zeros(len(bits), self.block_size, dtype=torch.int64)
        if self.filler == "random":
            texts = below(for_rest, self.vocab_size)
        texts[:, 0:first:2], texts[:, 1:first:2] = keys, values
        return texts.scatter(1, places, keys), ignored_like(texts).scatter(1, places, values)


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
