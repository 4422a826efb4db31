"""A text for next-token prediction."""

from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import Tensor

from apprentice import keyed
from apprentice.errors import BadInput
from datamodules.base import InMemoryData
from datamodules.memory import available_bytes
from datamodules.sampling import EpochOrder
from datamodules.splits import Split
from datamodules.vocabulary import Vocabulary

Unit = Literal["characters", "bytes"]
IGNORED = -100  # label of a token that is not predicted, as in torch's cross_entropy
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
        """The samples at these (k,) places, both (k, T) int64: one gather."""
        windows = self.text.unfold(0, self.length + 1, 1).index_select(0, chosen).long()
        return Split(windows[:, :-1], windows[:, 1:])

    def to(self, device: torch.device) -> "Windows":
        """The same on that device."""
        return Windows(self.text.to(device), self.length)


class BlockOrder(EpochOrder):
    """Cuts a text of at least 2 T tokens into blocks of T, from another offset in each epoch."""

    def __init__(self, tokens: int, length: int, *options: Any) -> None:
        super().__init__((tokens - length) // length, *options)
        self.length = length

    def indices(self) -> Tensor:
        """(size,) int64, the starts of the current epoch's blocks, in its order."""
        return super().indices() * self.length + keyed.fold_in(self.seed, self.epoch, 1) % self.length


class Text(InMemoryData):
    """A text whose last tenth is held out, for validation and for the test alike.

    A sample is a block of tokens; its labels are the tokens that follow each. An epoch cuts the training text into
    blocks at an offset that depends on seed and epoch. In the held-out text each token but the first is predicted once,
    in consecutive blocks; the last one overlaps the one before it, and labels there are -100.

    Attributes:
        block_size: T.
        vocabulary: what tokens stand for; known after the text is read.
        tokens_per_character: of the held-out text; 1 unless tokens are bytes.

    Args:
        path: any text file; default: the documentation that Python ships (`pydoc_data.topics`).
        block_size: T, tokens of a sample.
        vocabulary: tokens are the `characters` that occur in the text, or its `bytes`, 256 of them.
        batch_size: samples in a batch over all devices together, whatever their number.

    Raises:
        BadInput: a value can't be used; when read, the file is absent, empty, not UTF-8 (for characters), too short for
            a block in each part, or too large for memory.
    """

    given_to_nets = ("vocab_size", "block_size")

    def __init__(
        self,
        path: str | Path | None = None,
        block_size: int = 64,
        vocabulary: Unit = "characters",
        batch_size: int = 12,
    ) -> None:
        super().__init__(batch_size)
        if not isinstance(block_size, int) or block_size < 1:
            raise BadInput("data.block_size", block_size, "a whole number of tokens, at least 1")
        if vocabulary not in get_args(Unit):
            raise BadInput("data.vocabulary", vocabulary, " or ".join(get_args(Unit)))
        self.path = None if path is None else Path(path).expanduser()
        self.block_size, self.input_shape = block_size, (block_size,)
        self.unit, self.tokens_per_character = vocabulary, 1.0
        self.vocabulary: Vocabulary

    def setup(self, stage: str | None = None) -> None:
        """Read the text, once."""
        if self._splits:
            return
        tokens, held_out = self._parts(self._read())
        if len(held_out) <= self.block_size:
            expected = f"fewer tokens than the {len(held_out)} of the text's last tenth, or a longer --data.path"
            raise BadInput("data.block_size", self.block_size, expected)
        blocks = _consecutive(held_out, self.block_size)
        self._splits = {"train": Windows(tokens, self.block_size), "validation": blocks, "test": blocks}

    def _read(self) -> bytes:
        if self.path is None:
            from pydoc_data.topics import topics

            return "\n".join(topics.values()).encode()
        try:
            if self.path.stat().st_size * NEEDED > available_bytes():
                raise BadInput("data.path", self.path, "a text that fits in memory")
            return self.path.read_bytes()
        except OSError as error:
            raise BadInput("data.path", self.path, f"a file of text ({error.strerror})") from error

    def _parts(self, content: bytes) -> tuple[Tensor, Tensor]:
        """Tokens of the first nine tenths and of the last one, in the smallest type that holds them."""
        if not content:
            raise BadInput("data.path", self.path, "a file of text; this one is empty")
        if self.unit == "bytes":
            self.vocabulary = Vocabulary()
            parts = _tenths(torch.from_numpy(np.frombuffer(content, np.uint8).copy()))
            held_out = bytes(parts[1].tolist())
            self.tokens_per_character = len(held_out) / max(len(held_out.decode(errors="replace")), 1)
            return parts
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            expected = f"text in UTF-8; byte {error.start} is not. --data.vocabulary bytes takes any file"
            raise BadInput("data.path", self.path, expected) from None
        self.vocabulary = Vocabulary(text)
        kind = torch.uint8 if len(self.vocabulary) <= 256 else torch.int32
        return _tenths(self.vocabulary.encode(text).to(kind))

    @property
    def sizes(self) -> dict[str, int]:
        """Counts of tokens: in the training text, and predicted in the held-out text."""
        held_out = int((self.split("test").labels != IGNORED).sum())
        return {"train": len(cast("Windows", self.split("train")).text), "validation": held_out, "test": held_out}

    def _size(self, part: str, kept: int) -> int:
        """Tokens of so many blocks."""
        if part == "train":
            return kept * self.block_size
        return int((self.split(part).labels[self._chosen(part, kept)] != IGNORED).sum())

    @property
    def num_classes(self) -> int:
        """The size of the vocabulary."""
        self.split("train")
        return len(self.vocabulary)

    @property
    def vocab_size(self) -> int:
        """The number of classes, under the name that language models use."""
        return self.num_classes

    @property
    def train_inputs_repeat(self) -> bool:
        """False: each epoch has its own blocks."""
        return False

    def _order(self, size: int) -> EpochOrder:
        return BlockOrder(size + self.block_size, self.block_size, self.order_seed, self._position)

    @property
    def evaluation_batch_size(self) -> int:
        """Blocks in an evaluation batch."""
        return max(EVALUATED // self.block_size, 1)

    def normalize(self, inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Stored tokens (B, T) as embeddings take them: int64, whatever the module's type."""
        return inputs.long()


def _tenths(tokens: Tensor) -> tuple[Tensor, Tensor]:
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def _consecutive(tokens: Tensor, length: int) -> Split:
    """Blocks (k, T) and labels (k, T) int64, which predict each token but the first once."""
    last = len(tokens) - 1 - length
    starts = torch.tensor([*range(0, last + 1, length), *([last] if last % length else [])])
    inputs, labels = Windows(tokens, length).take(starts)
    if last % length:
        labels = labels.clone()
        labels[-1, : length - last % length] = IGNORED
    return Split(inputs.to(tokens.dtype), labels)
