"""Token numbers for characters or bytes."""

import numpy as np
import torch
from torch import Tensor

from apprentice.errors import BadInput

BYTES = 256
SHOWN = 10  # unknown characters in a message


class Vocabulary:
    """Characters, numbered in Unicode order, or the 256 bytes of UTF-8.

    Attributes:
        characters: the known ones, each once and sorted; None for bytes.

    Args:
        characters: any text with all characters of the vocabulary; None for bytes.
    """

    def __init__(self, characters: str | None = None) -> None:
        self._codes = None if characters is None else np.unique(_codes(characters))
        self.characters = None if self._codes is None else _text(self._codes)

    def __len__(self) -> int:
        return BYTES if self._codes is None else len(self._codes)

    @property
    def start(self) -> str:
        """A prompt of one character: a new line, if that is known."""
        return "\n" if self.characters is None or "\n" in self.characters else self.characters[0]

    def encode(self, text: str, flag: str = "prompt") -> Tensor:
        """(n,) int64, the tokens of a text; BadInput names characters that are unknown."""
        if self._codes is None:
            return torch.tensor(list(text.encode(errors="surrogatepass")), dtype=torch.int64)
        codes = _codes(text)
        places = np.searchsorted(self._codes, codes).clip(max=len(self) - 1)
        if len(unknown := np.unique(codes[self._codes[places] != codes])):
            shown = " ".join(map(repr, _text(unknown[:SHOWN]))) + " ..." * (len(unknown) > SHOWN)
            raise BadInput(flag, repr(text), f"the {len(self)} characters that were trained on; unknown: {shown}")
        return torch.from_numpy(places)

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (n,); bytes that are not UTF-8 become U+FFFD."""
        if self._codes is None:
            return bytes(tokens.tolist()).decode(errors="replace")
        return _text(self._codes[tokens.numpy(force=True)])


def _codes(text: str) -> np.ndarray:
    """(n,) uint32, the characters' code points."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _text(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-32-le", "surrogatepass")
