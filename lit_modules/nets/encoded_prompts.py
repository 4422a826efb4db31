"""Rows of tokens whose prompts an encoder reads, and whose rest a decoder continues."""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets.base import Net, check_tokens
from lit_modules.nets.generation import Decoder, Recomputing


class EncodedPrompts(NamedTuple):
    """Rows (b, T) in two parts."""

    prompts: Tensor  # (b, T) int64, filled up at their ends
    present: Tensor  # (b, T) bool, false where they are filled up
    inputs: Tensor  # (b, T) int64, of the decoder: a start token, and the rest of the row
    places: Tensor  # (b, T) int64, of the decoder's inputs that say what follows a token; 0 within the prompt


class EncoderDecoderNet(Net):
    """A language model whose encoder reads a row's prompt, up to the first `prompt_end`, and whose decoder the rest.

    So all that follows has a next token's logits, also of several turns. A row without such a token has its first one
    as its prompt. Both parts are as wide as the row, so that a row's bits depend on no other row.

    Attributes:
        prompt_end: the token that ends a prompt.
        start: the decoder's first token.
        block_size: tokens of a row at most.
        vocab_size: V, of the logits.
    """

    prompt_end: int
    start: int
    block_size: int
    vocab_size: int

    @abstractmethod
    def encode(self, prompts: Tensor, present: Tensor) -> Any:
        """Return what a decoder reads of prompts (b, M), of which the tokens `present` (b, M) are no padding."""

    @abstractmethod
    def decode(self, tokens: Tensor, memory: Any, past: Any = None) -> tuple[Tensor, Any]:
        """Return what `end` takes of tokens (b, t), which follow those of a past, and their past; None begins one."""

    @abstractmethod
    def begin(self, memory: Any, capacity: int) -> Any:
        """Return an empty past for texts of so many tokens."""

    @abstractmethod
    def end(self, x: Tensor) -> Tensor:
        """Return logits (b, T, V) of what `decode` gave."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of tokens (B, T), whole numbers; those of a prompt's tokens but the last mean nothing."""
        check_tokens(tokens)
        if tokens.shape[1] > self.block_size:
            raise BadInput("tokens", tuple(tokens.shape), f"texts of at most {self.block_size}, the block size")
        rows = self.part(tokens.long())
        x, _ = self.decode(rows.inputs, self.encode(rows.prompts, rows.present))
        return self.end(x.gather(1, rows.places[:, :, None].expand(-1, -1, x.shape[2])))

    def part(self, tokens: Tensor) -> EncodedPrompts:
        """Part rows (b, T) int64 after their first `prompt_end`."""
        ends, places = tokens == self.prompt_end, torch.arange(tokens.shape[1], device=tokens.device)
        lengths = (ends.int().argmax(1) + 1).where(ends.any(1), 1)[:, None]
        rest = tokens.gather(1, (places + lengths - 1).clamp(max=tokens.shape[1] - 1))
        present = places < lengths
        return EncodedPrompts(
            tokens.where(present, self.prompt_end), present, rest.where(places > 0, self.start),
            (places - lengths + 1).clamp(min=0),
        )  # fmt: skip

    def decoder(self, capacity: int, padding: Tensor | None) -> Decoder:
        """Return what `generate` of `lit_modules.nets.generation` asks for the next logits."""
        return _Continued(self, capacity, padding)


class _Continued:
    """A decoder of an `EncoderDecoderNet`: prompts are read once, unless one goes on after the encoder's part."""

    def __init__(self, net: EncoderDecoderNet, capacity: int, padding: Tensor | None) -> None:
        self.net, self.capacity, self.padding = net, capacity, padding
        self.again: Recomputing | None = None
        self.memory: Any = None
        self.past: Any = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (b, V) after the last of tokens (b, t), which follow those of earlier calls."""
        if self.memory is None and self.again is None:
            tokens = self._read(tokens)
        if self.again is not None:
            return self.again(tokens)
        x, self.past = self.net.decode(tokens, self.memory, self.past)
        return self.net.end(x[:, -1:])[:, 0]

    def _read(self, tokens: Tensor) -> Tensor:
        """Encode prompts (b, t), padded on the left; return the decoder's first tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        padding = tokens.new_zeros(len(tokens)) if self.padding is None else self.padding
        present = places >= padding[:, None]
        ends = (tokens == self.net.prompt_end) & present
        if not (ends[:, -1] & (ends.sum(1) == 1)).all():
            self.again = Recomputing(self.net, self.padding)
            return tokens
        shifted = tokens.gather(1, (places + padding[:, None]).clamp(max=tokens.shape[1] - 1))
        self.memory = self.net.encode(shifted, places < tokens.shape[1] - padding[:, None])
        self.past = self.net.begin(self.memory, self.capacity)
        return torch.full_like(tokens[:, :1], self.net.start)
