"""A plain text for next-token prediction, cut into blocks."""

from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor

from apprentice import keyed
from apprentice.batch import IGNORED
from apprentice.errors import BadInput
from datamodules import fingerprints
from datamodules.data_hooks import LIMITS
from datamodules.fingerprints import Fingerprint
from datamodules.loaders import EpochOrder
from datamodules.memory import available_bytes
from datamodules.splits import Split, count_held_out
from datamodules.text.base import TextData
from datamodules.text.vocabulary import Subwords, Vocabulary

Unit = Literal["characters", "bytes"]
EVALUATED = 8192  # tokens in an evaluation batch, about
NEEDED = 16  # bytes of memory that reading takes for each of the file's


class Windows(NamedTuple):
    """All windows of T tokens in a text (n,): sample i is tokens i to i + T, its labels are one token later."""

    text: Tensor
    length: int

    @property
    def inputs(self) -> Tensor:
        """(n - T, T), a view."""
        return self.text[:-1].unfold(0, self.length, 1)

    @property
    def labels(self) -> Tensor:
        """(n - T, T), a view."""
        return self.text[1:].unfold(0, self.length, 1)

    def take(self, chosen: Tensor) -> Split:
        """Return the samples at these (k,) places, both (k, T) int64, in one gather."""
        windows = self.text.unfold(0, self.length + 1, 1).index_select(0, chosen).long()
        return Split(windows[:, :-1], windows[:, 1:])

    def to(self, device: torch.device) -> "Windows":
        return Windows(self.text.to(device), self.length)


class BlockOrder(EpochOrder):
    """Cuts a text of at least 2 T tokens into blocks of T, from another offset in each epoch."""

    def __init__(self, tokens: int, length: int, *options: Any) -> None:
        super().__init__((tokens - length) // length, *options)
        self.length = length

    def indices(self) -> Tensor:
        """(size,) int64, the starts of the current epoch's blocks, in its order."""
        return super().indices() * self.length + keyed.fold_in(self.seed, self.epoch, 1) % self.length


class Text(TextData):
    """A text to train on, whose end is held out: a part to validate on, then the last tenth to test on.

    A sample is a block of tokens; its labels are the tokens that follow each. An epoch cuts the training text into
    blocks at an offset that depends on seed and epoch. In a held-out part each token but the first is predicted once,
    in consecutive blocks; the last one overlaps the one before it, and labels there are -100. Parts share no token.
    They are whole stretches, not blocks drawn by a key: a text repeats itself from one block to the next, so that a
    block among those that train would say little about text that is new.

    Attributes:
        block_size: T.
        vocabulary: what tokens stand for; known after the text is read.
        tokens_per_character: of each part of the text; 1 if tokens are characters.

    Args:
        path: any text file; default: the documentation that Python ships (`pydoc_data.topics`).
        block_size: T, tokens of a sample.
        vocabulary: tokens are the `characters` that occur in the text, or its `bytes`, 256 of them.
        batch_size: samples in a batch over all devices together, whatever their number.
        tokenizer: tokens are those of this Hugging Face tokenizer instead, by name or folder. In `kd.py` a
            teacher that is a HuggingFaceLM brings its own.
        validation_size: of the first nine tenths, how much of their end to validate on: a count of characters (of
            `bytes`, where these are the tokens), or a fraction; 0 for none, as in nanoGPT.
        same_blocks: train on the same blocks in each epoch, not on those of another offset: a teacher's outputs for
            them can be stored.

    Raises:
        BadInput: a value can't be used; when read, the file is absent, empty, not UTF-8 (for characters), too short for
            a block in each part, or too large for memory.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        block_size: int = 64,
        vocabulary: Unit = "characters",
        batch_size: int = 12,
        tokenizer: str | None = None,
        validation_size: int | float = 0.1,  # noqa: PYI041 - the command line must distinguish a count from a fraction
        same_blocks: bool = False,
    ) -> None:
        super().__init__(batch_size, validation_size=validation_size)
        if not isinstance(block_size, int) or block_size < 1:
            raise BadInput("data.block_size", block_size, "a whole number of tokens, at least 1")
        if vocabulary not in get_args(Unit):
            raise BadInput("data.vocabulary", vocabulary, " or ".join(get_args(Unit)))
        if vocabulary == "bytes" and tokenizer is not None:
            raise BadInput("data.vocabulary", vocabulary, f"not allowed with `data.tokenizer {tokenizer}`")
        self.path = None if path is None else Path(path).expanduser()
        self.block_size, self.input_shape, self.label_shape = block_size, (block_size,), (block_size,)
        self.same_blocks = same_blocks
        self.unit, self.tokenizer = vocabulary, tokenizer

    @property
    def train_inputs_repeat(self) -> bool:
        return self.same_blocks

    @property
    def evaluation_batch_size(self) -> int:
        return max(EVALUATED // self.block_size, 1)

    def setup(self, stage: str | None = None) -> None:
        if self._splits:
            return
        training, validation, test = self._split_tokens(self._read())
        if len(test) <= self.block_size:
            expected = f"fewer tokens than the {len(test)} of the text's last tenth, or a longer `data.path`"
            raise BadInput("data.block_size", self.block_size, expected)
        if self.validation_size and not (len(validation) > self.block_size and len(training) >= 2 * self.block_size):
            expected = f"0, or more than a block of {self.block_size} tokens, with two blocks left to train on"
            raise BadInput("data.validation_size", self.validation_size, expected)
        cut = whole_blocks if self.same_blocks else Windows
        self._splits = {
            "train": cut(training, self.block_size),
            "validation": consecutive_blocks(validation, self.block_size),
            "test": consecutive_blocks(test, self.block_size),
        }
        self._tokens = {"train": training, "validation": validation, "test": test}
        self.say_left_out()

    def all_tokens(self) -> Iterable[np.ndarray]:
        return [tokens.numpy() for tokens in self._tokens.values()]

    def fingerprint(self) -> Fingerprint:
        """Of the tokens, whatever the blocks into which they are cut."""
        self.setup()
        return {part: fingerprints.of_tensors(tokens) for part, tokens in self._tokens.items()}

    def _read(self) -> bytes:
        if self.path is not None and self.path.suffix in {".jsonl", ".ndjson"}:
            expected = "a file of plain text; `data Chat` reads JSON lines, and learns the responses alone"
            raise BadInput("data.path", self.path, expected)
        if self.path is None:
            from pydoc_data.topics import topics

            return "\n".join(topics.values()).encode()
        try:
            if self.path.stat().st_size * NEEDED > available_bytes():
                raise BadInput("data.path", self.path, "a text that fits in memory")
            return self.path.read_bytes()
        except OSError as error:
            raise BadInput("data.path", self.path, f"a file of text ({error.strerror})") from error

    def _split_tokens(self, content: bytes) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens to train on, to validate on and to test on, in the smallest type that holds them."""
        if not content:
            raise BadInput("data.path", self.path, "a file of text; this one is empty")
        if self.unit == "bytes":
            self.vocabulary = Vocabulary()
            begin, cut = self._bounds(len(content))
            tokens = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
            pieces = content[:begin], content[begin:cut], content[cut:]
            self._set_rates(pieces, [piece.decode(errors="replace") for piece in pieces])
            return tokens[:begin], tokens[begin:cut], tokens[cut:]
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            expected = f"text in UTF-8; byte {error.start} is not. `data.vocabulary bytes` takes any file"
            raise BadInput("data.path", self.path, expected) from None
        self.vocabulary = Vocabulary(text) if self.tokenizer is None else Subwords(self.tokenizer)
        kind, (begin, cut) = torch.uint8 if len(self.vocabulary) <= 256 else torch.int32, self._bounds(len(text))
        parts = text[:begin], text[begin:cut], text[cut:]
        training, validation, test = (self.vocabulary.encode(part, "data.path").to(kind) for part in parts)
        self._set_rates((training, validation, test), parts)
        return training, validation, test

    def _set_rates(self, tokens: Sequence[Sized], texts: Sequence[str]) -> None:
        rates = [len(part) / max(len(text), 1) for part, text in zip(tokens, texts, strict=True)]
        self.tokens_per_character = dict(zip(LIMITS, rates, strict=True))

    def _bounds(self, size: int) -> tuple[int, int]:
        """Where in a text of this size the validation part begins, and the test's."""
        cut = size * 9 // 10
        return max(cut - count_held_out(self.validation_size, cut), 0), cut

    @property
    def places(self) -> int:
        return len(self.split("train").labels) if self.same_blocks else super().places

    @property
    def sizes(self) -> dict[str, int]:
        """Counts of tokens: in the training text, and predicted in the held-out parts."""
        predicted = {part: int((self.split(part).labels != IGNORED).sum()) for part in ("validation", "test")}
        return {"train": len(self._tokens["train"]), **predicted}

    def used(self, trainer: Trainer) -> dict[str, int]:
        blocks, tokens = super().used(trainer), self.sizes
        if blocks["train"] < len(self._order(len(self.split("train").labels))):
            tokens["train"] = blocks["train"] * self.block_size
        for part in ("validation", "test"):
            tokens[part] = int((self.split(part).labels[self._evaluated_places(part, blocks[part])] != IGNORED).sum())
        return tokens

    def _order(self, size: int) -> EpochOrder:
        if self.same_blocks:
            return super()._order(size)
        return BlockOrder(size + self.block_size, self.block_size, self.order_seed, self._position)


def whole_blocks(tokens: Tensor, length: int) -> Split:
    """Blocks (k, T) and labels (k, T) int64, one after the other; tokens at the end that fill no block are left out."""
    inputs, labels = Windows(tokens, length).take(torch.arange(0, len(tokens) - length, length))
    return Split(inputs.to(tokens.dtype), labels)


def consecutive_blocks(tokens: Tensor, length: int) -> Split:
    """Blocks (k, T) and labels (k, T) int64, which predict each token but the first once; none of no tokens."""
    if not len(tokens):
        return Split(tokens.view(0, length), torch.zeros(0, length, dtype=torch.int64))
    last = len(tokens) - 1 - length
    starts = torch.tensor([*range(0, last + 1, length), *([last] if last % length else [])])
    inputs, labels = Windows(tokens, length).take(starts)
    if last % length:
        labels = labels.clone()
        labels[-1, : length - last % length] = IGNORED
    return Split(inputs.to(tokens.dtype), labels)
