"""A teacher whose tokens are others than the student's: it reads the same texts, and is compared where both end."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apprentice.batch import label_mask
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.base import Net


class TokenTexts(NamedTuple):
    """What a tokenizer's tokens stand for."""

    texts: Sequence[bytes]  # of each token; of a special one its name
    encode: Callable[[str], Sequence[int]]
    ends: tuple[int, ...] = ()  # that end a response
    content: str = ""  # what determines the tokens of a text


def text_lengths(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return (b,), the tokens of rows (b, T) up to the last that is learned by labels (b, T); any fill the rest.

    That token is among the inputs unless it is the last of its text.
    """
    places = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    lengths = (label_mask(labels) * places).amax(1, keepdim=True).clamp(min=1)  # (b, 1), up to the last that counts
    following = inputs.gather(1, lengths.clamp(max=labels.shape[1] - 1)) == labels.gather(1, lengths - 1)
    return (lengths + (following & (lengths < labels.shape[1])))[:, 0]


class OtherTokens(Net):
    """A frozen language model that is asked in the tokens of another tokenizer.

    A row's tokens are a text, of bytes. Where a token of this text ends at the same byte in both tokenizers, a group of
    tokens ends; what the model says of the group is, by the chain rule, the probabilities of its tokens but the last
    multiplied with the distribution of the last. A row is a text as far as its length says, by default all.

    Attributes:
        matched: (n,) tokens of the student and as many of the teacher, with the same text; ends of a response, too.

    Args:
        net: tokens (b, T') of the teacher to logits (b, T', V').
        ours: the student's tokens.
        theirs: the teacher's.
    """

    is_trained = True
    is_comparable = False

    def __init__(self, net: nn.Module, ours: TokenTexts, theirs: TokenTexts) -> None:
        super().__init__()
        self.net, self.ours, self.theirs = net, ours, theirs
        numbers = {text: number for number, text in reversed([*enumerate(theirs.texts)])}
        pairs = {number: numbers[text] for number, text in enumerate(ours.texts) if text in numbers}
        if ours.ends and theirs.ends and theirs.ends[0] not in pairs.values():
            pairs[ours.ends[0]] = theirs.ends[0]
        used = dict[int, int]()
        for number, other in pairs.items():
            used.setdefault(other, number)
        self.matched = torch.tensor([*used.values()], dtype=torch.int64), torch.tensor([*used], dtype=torch.int64)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """(b, T) to (b, T, 1 + V'): for each token that ends a group the student's tokens in it, else 0, and its log p.

        The token at a place is the next one, as that of logits. `lengths` (b,) are those of the texts.
        """
        if lengths is None:  # of an example, or of rows that stand for none
            lengths = torch.full((len(tokens),), tokens.shape[1])
        rows = [self._read(row[:length]) for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        width = max([len(theirs) for _, theirs in rows] or [1])
        inputs = torch.tensor([theirs + [0] * (width - len(theirs)) for _, theirs in rows], device=tokens.device)
        logits: Tensor = self.net(inputs)
        log_p = widen(logits).log_softmax(-1)
        outputs = log_p.new_zeros(*tokens.shape, 1 + log_p.shape[-1])
        for number, (groups, theirs) in enumerate(rows):
            actual = log_p[number, : len(theirs) - 1].gather(1, inputs[number, 1 : len(theirs), None])[:, 0]
            for place, size, first, last in groups:
                outputs[number, place, 0] = size
                outputs[number, place, 1:] = log_p[number, last] + actual[first:last].sum()
        return outputs

    def _read(self, tokens: list[int]) -> tuple[list[tuple[int, int, int, int]], list[int]]:
        """Return a text's groups, and its tokens as the teacher has them.

        Of each group: the place of the student's last token, tokens in it, places of the teacher's first and last.
        """
        length, whole = len(tokens), b"".join(self.ours.texts[token] for token in tokens)
        try:
            text = whole.decode()
        except UnicodeDecodeError as error:  # within a character, or after what is none
            text = whole[: error.start].decode()
        longest = getattr(self.net, "block_size", None)
        theirs = [*self.theirs.encode(text)][:longest] or [0]
        ours, others = (_ends(x, table.texts) for x, table in ((tokens, self.ours), (theirs, self.theirs)))
        again = b"".join(self.theirs.texts[token] for token in theirs)
        same = next((i for i, (a, b) in enumerate(zip(whole, again, strict=False)) if a != b), len(again))
        places = {end: place for place, end in enumerate(others) if end <= same}
        last = {end: place for place, end in enumerate(ours)}
        shared = [(place, places[end]) for end, place in last.items() if end in places]
        groups = [(b - 1, b - a, c, d - 1) for (a, c), (b, d) in pairwise(shared)]
        if shared and shared[-1] == (length - 1, len(theirs) - 1):  # the last token, which is not among the inputs
            groups.append((length - 1, 1, len(theirs) - 1, len(theirs) - 1))
        return groups, theirs


def _ends(tokens: Sequence[int], texts: Sequence[bytes]) -> list[int]:
    """Return the bytes of a text up to the end of each token."""
    total, ends = 0, list[int]()
    for token in tokens:
        total += len(texts[token])
        ends.append(total)
    return ends
