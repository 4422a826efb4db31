"""What token numbers stand for: characters, bytes, or the tokens of a Hugging Face tokenizer."""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apprentice.errors import BadInput, reason
from apprentice.extras import need

SHOWN = 10  # unknown characters in a message


class Vocabulary:
    """Characters, numbered in Unicode order, or the 256 bytes of UTF-8.

    `characters` is any text with all characters of the vocabulary; the attribute has each once, sorted. None for bytes.
    """

    def __init__(self, characters: str | None = None) -> None:
        self._codes = None if characters is None else np.unique(_codes(characters))
        self.characters = None if self._codes is None else _text(self._codes)

    def __len__(self) -> int:
        return 256 if self._codes is None else len(self._codes)

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
            listed = " ".join(map(repr, _text(unknown[:SHOWN]))) + " ..." * (len(unknown) > SHOWN)
            raise BadInput(flag, repr(text), f"the {len(self)} characters that were trained on; unknown: {listed}")
        return torch.from_numpy(places)

    def content(self) -> str:
        """Return what determines its tokens."""
        return repr(self.characters)

    def plain(self) -> dict[str, Any]:
        """What `vocabulary_of` makes it of."""
        return {"characters": self.characters}

    def decode(self, tokens: Tensor) -> str:
        """The text of tokens (n,); bytes that are not UTF-8 become U+FFFD."""
        if self._codes is None:
            return bytes(tokens.tolist()).decode(errors="replace")
        return _text(self._codes[tokens.numpy(force=True)])


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)  # (n,) code points


def _text(codes: np.ndarray) -> str:
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


class Subwords:
    """The tokens of a Hugging Face tokenizer, by its name or folder; needs the extra `transformers`.

    Raises:
        BadInput: it can't be had.
    """

    def __init__(self, name: str) -> None:
        need("transformers", "transformers")
        import transformers

        transformers.logging.set_verbosity_error()  # a text is longer than a model's context
        try:
            with warnings.catch_warnings(action="ignore"):  # from what it imports
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        except Exception as error:  # noqa: BLE001 - whatever a tokenizer's own code raises
            expected = f"a tokenizer of Hugging Face, by name or folder; it says: {reason(error)}"
            raise BadInput("data.tokenizer", name, expected) from None
        self.name, self.start = name, "\n"

    def content(self) -> str:
        """Return what determines its tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        whole = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        return f"{whole} {self.tokenizer.special_tokens_map}"

    def __len__(self) -> int:
        return len(self.tokenizer)

    def encode(self, text: str, flag: str = "prompt") -> Tensor:
        return torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)

    def same_as(self, other: "Subwords") -> bool:
        return bool(self.tokenizer.get_vocab() == other.tokenizer.get_vocab())

    def decode(self, tokens: Tensor) -> str:
        return str(self.tokenizer.decode(tokens.tolist()))

    def plain(self) -> dict[str, Any]:
        return {"tokenizer": self.name}


def vocabulary_of(plain: Mapping[str, Any]) -> "Vocabulary | Subwords":
    """The vocabulary that `plain` describes; TypeError if it describes none."""
    return Subwords(plain["tokenizer"]) if plain.keys() == {"tokenizer"} else Vocabulary(**plain)


def token_texts(vocabulary: Vocabulary | Subwords, flag: str) -> list[bytes]:
    """Return the bytes of each token, of a special one those of its name.

    Raises:
        BadInput: for `flag`, the tokens of a tokenizer are no bytes, as those of SentencePiece.
    """
    if isinstance(vocabulary, Vocabulary):
        if vocabulary.characters is None:
            return [bytes([number]) for number in range(256)]
        return [character.encode(errors="surrogatepass") for character in vocabulary.characters]
    letters = {letter: number for number, letter in enumerate(_letters())}
    added = {number: str(token).encode() for number, token in vocabulary.tokenizer.added_tokens_decoder.items()}
    names = {number: token for token, number in vocabulary.tokenizer.get_vocab().items()}
    texts = list[bytes]()
    for number in range(len(vocabulary)):
        name = names.get(number, "")
        if number in added or not name:
            texts.append(added.get(number, b""))
        elif {*name} <= letters.keys():
            texts.append(bytes(letters[letter] for letter in name))
        else:
            raise BadInput(
                flag, vocabulary.name, f"a tokenizer of bytes, as GPT-2's, Llama 3's and Qwen's; {name!r} is no bytes"
            )
    return texts


def _letters() -> list[str]:
    """Return the letter for each of 256 bytes in the tokens of byte-level BPE (GPT-2, Radford et al. 2019)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]
