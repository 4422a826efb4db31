"""A stand-in for a teacher whose outputs are all in a file."""

import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets.base import Net


class StoredTeacher(Net):
    """A teacher that is not loaded: a run reads its outputs for the training texts from a file.

    It tells their shape, and can't be asked for any other.

    Args:
        vocab_size: number of tokens, V.
        teacher: what the file says of the teacher: a hash of where its weights come from.
    """

    is_trained = True

    def __init__(self, vocab_size: int, teacher: str) -> None:
        super().__init__()
        self.vocab_size, self.teacher = vocab_size, teacher

    def zeros(self, tokens: Tensor) -> Tensor:
        """(B, T, V) zeros in the place of logits of tokens (B, T), for checks of shapes."""
        return torch.zeros(*tokens.shape, self.vocab_size, device=tokens.device)

    def forward(self, tokens: Tensor) -> Tensor:
        raise BadInput("teacher", type(self).__name__, "a net with weights; of this one a run had stored outputs alone")
