"""Bytes of texts to tokens of a Hugging Face tokenizer, inside of a net's forward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lit_modules.nets.transformers_models import SAFE, import_transformers

REMEMBERED = 2**17  # texts whose tokens are kept for the next epoch, and for other nets of the same tokenizer

Text = str | tuple[str, str]


class TextTokenizer:
    """A tokenizer of a model; copies of a net share it, with the tokens of the texts that it has seen.

    Args:
        name: the model, by its name on the hub or its folder.
        max_length: tokens of a text at most; default: what tokenizer and model can take.
        largest: positions that the model has, if these end.
    """

    def __init__(self, name: str, max_length: int | None, largest: int | None) -> None:
        with import_transformers(name, "a model with its tokenizer") as transformers:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name, **SAFE)
        limits = (max_length or self.tokenizer.model_max_length, largest)
        self.max_length = int(min(x for x in limits if x is not None))
        self._known: dict[Text, dict[str, list[int]]] = {}

    def __deepcopy__(self, _: Any) -> "TextTokenizer":
        return self

    def __call__(self, texts: Sequence[Text], device: torch.device) -> dict[str, Tensor]:
        """Return a model's inputs (n, T) of texts or of pairs of texts, filled up at their ends, with a mask of ones.

        Each is cut to `max_length` tokens, of a pair the longer text first.
        """
        new = [*dict.fromkeys(text for text in texts if text not in self._known)]
        if len(self._known) + len(new) > REMEMBERED:
            self._known.clear()
            new = [*dict.fromkeys(texts)]
        if new:
            self._known.update(zip(new, self._encode(new), strict=True))
        rows = [self._known[text] for text in texts]
        longest = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": self.tokenizer.pad_token_id or 0}
        return {
            name: torch.tensor(
                [row[name] + [fill.get(name, 0)] * (longest - len(row[name])) for row in rows], device=device
            )
            for name in rows[0]
        }

    def _encode(self, texts: Sequence[Text]) -> list[dict[str, list[int]]]:
        """Return each text's inputs of a model by name: tokens, ones and, if it takes such, which text of a pair."""
        columns = [texts] if isinstance(texts[0], str) else [*zip(*texts, strict=True)]
        options = {"return_attention_mask": True, "padding": False, "verbose": False}
        encoded = self.tokenizer(*map(list, columns), truncation=True, max_length=self.max_length, **options)
        return [dict(zip(encoded, values, strict=True)) for values in zip(*encoded.values(), strict=True)]


def decode_texts(texts: Tensor) -> list[str]:
    """Return n texts of bytes (n, L) in UTF-8; zeros at an end fill it up."""
    rows = texts.to(torch.uint8).numpy(force=True)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
