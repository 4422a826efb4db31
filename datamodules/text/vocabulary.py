"""What token numbers stand for: characters, bytes, or the tokens of a Hugging Face tokenizer."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apprentice.errors import BadInput, reason
from apprentice.extras import need

SHOWN = 10  # unknown characters, or tokens, in a message


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

    Where a model of the same name has fewer rows than there are tokens, as Gemma 3 of text alone, the last tokens are
    left out: no text may have them.

    Attributes:
        left_out: these tokens' texts.

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
        rows = _rows_of_model(transformers, name)
        self._size = min(len(self.tokenizer), rows) if rows else len(self.tokenizer)
        numbers = self.tokenizer.get_vocab() if self._size < len(self.tokenizer) else {}
        beyond = (text for text, number in numbers.items() if number >= self._size)
        self.left_out = sorted(beyond, key=numbers.__getitem__)  # tokenizers give no order

    def numbers(self) -> dict[str, int]:
        """Return the number of each token, by its text."""
        known = self.tokenizer.get_vocab()
        return {text: known[text] for text in known.keys() - {*self.left_out}}

    def added(self) -> set[str]:
        """Return the texts of tokens that were added to the vocabulary, as special ones are."""
        return {str(token) for token in self.tokenizer.added_tokens_decoder.values()}

    def beyond(self, other: "Subwords") -> list[str]:
        """Return the texts of the tokens that another tokenizer lacks."""
        numbers = self.numbers()
        return sorted(numbers.keys() - other.numbers().keys(), key=numbers.__getitem__)

    def keeps_numbers_of(self, other: "Subwords") -> bool:
        """Return whether another tokenizer differs in added tokens alone, and the rest have the same numbers."""
        ours, theirs = self.numbers(), other.numbers()
        if not ours.keys() ^ theirs.keys() <= self.added() | other.added():
            return False
        return all(ours[text] == theirs[text] for text in ours.keys() & theirs.keys())

    def content(self) -> str:
        """Return what determines its tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        whole = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        left_out = f" without {self.left_out}" if self.left_out else ""
        return f"{whole} {self.tokenizer.special_tokens_map}{left_out}"

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str, flag: str = "prompt") -> Tensor:
        tokens = np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int64)
        self.check_rows(tokens, flag)
        return torch.from_numpy(tokens)

    def check_rows(self, tokens: np.ndarray, flag: str) -> None:
        """Raise BadInput for `flag` if tokens (n,) are among those that are left out."""
        if self.left_out and len(beyond := tokens[tokens >= self._size]):
            token = self.tokenizer.convert_ids_to_tokens(int(beyond[0]))
            raise BadInput(flag, token, f"texts without this token, for which the model {self.name} has no row")

    def same_as(self, other: "Subwords") -> bool:
        return self.numbers() == other.numbers()

    def decode(self, tokens: Tensor) -> str:
        return str(self.tokenizer.decode(tokens.tolist()))

    def plain(self) -> dict[str, Any]:
        return {"tokenizer": self.name}


def name_tokens(names: Sequence[str]) -> str:
    """Write the texts of tokens, the first of many."""
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN:,} others" * (len(names) > SHOWN)


def _rows_of_model(transformers: Any, name: str) -> int | None:
    """Return the rows of the vocabulary of the model beside a tokenizer, if there is one."""
    try:
        with warnings.catch_warnings(action="ignore"):
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - a folder of a tokenizer alone, or a model of a kind that is not known
        return None
    return getattr(config.get_text_config(), "vocab_size", None)


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
