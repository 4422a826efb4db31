"""What all caches of mixers share: texts may be reordered, and the last tokens be taken back."""

import torch
from torch import Tensor

from apprentice.errors import BadInput
from apprentice.private import tree_map_only


class MixerCache:
    """What a mixer keeps of the texts that it continues; the base of its kinds, and of your own.

    Use one for each layer and batch of texts, under `torch.no_grad()`. All tensors among its attributes, inside lists
    and tuples too, have a row for each text.

    Args:
        padding: (B,) int64, tokens before the first of each text; None for none.

    Attributes:
        length: tokens seen, padding among them: the place of the next.
    """

    def __init__(self, padding: Tensor | None = None) -> None:
        self.padding, self.length = padding, 0

    def reorder(self, rows: Tensor) -> None:
        """Go on with the texts of these numbers (b,) int64: some may be left out, repeated or in another order."""
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise BadInput("rows", f"{tuple(rows.shape)} {rows.dtype}", "(b,) int64, numbers of texts")
        vars(self).update(tree_map_only(Tensor, lambda x: x[rows], vars(self)))

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens alone, padding among them.

        Raises:
            BadInput: more than there are, or a kind that can't take tokens back.
        """
        if not 0 <= length <= self.length:
            raise BadInput("length", length, f"0 to {self.length}, the tokens that are cached")
        if length < self.length:
            self.take_back(length)
            self.length = length

    def take_back(self, length: int) -> None:
        """Forget the tokens after the first `length`, fewer than there are; BadInput if this kind can't."""
        expected = (
            f"{self.length}, all tokens: {type(self).__name__} can't take some back; copy.deepcopy it before them"
        )
        raise BadInput("length", length, expected)
