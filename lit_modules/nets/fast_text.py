"""A bag of hashed n-grams (Joulin et al. 2017, "Bag of Tricks for Efficient Text Classification", arXiv:1607.01759)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.base import Net, check_sizes, check_text_shape, check_tokens

PRIME, FACTOR = 2**31 - 1, 2654435761  # of the hash; products fit in int64


class FastText(Net):
    """Bytes (B, T) to logits (B, classes), from the mean of the embeddings of n-grams, of which there are `buckets`.

    An n-gram begins at each byte that is not 0, with zeros after the text's end; capitals of ASCII count as small
    letters. Equal hashes share an embedding.

    Args:
        width: of an n-gram's embedding.
        buckets: embeddings.
        lengths: of n-grams, in bytes.
        input_shape: (T,) of texts, any T.
    """

    feature_layer = "bag"
    stages = ("bag",)
    pooled_layer = "head<"

    def __init__(
        self,
        width: int = 128,
        buckets: int = 8192,
        lengths: Sequence[int] = (3,),
        input_shape: tuple[int, ...] = (64,),
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        check_text_shape(input_shape)
        if not lengths or min(lengths) < 1:
            raise BadInput("lengths", [*lengths], "numbers of bytes, each at least 1")
        check_sizes(width=width, buckets=buckets)
        self.bag, self.head = _Bag(width, buckets, tuple(lengths)), nn.Linear(width, num_classes)

    def forward(self, texts: Tensor) -> Tensor:
        """Logits (B, classes) of bytes (B, T), integers of any type."""
        check_tokens(texts)
        logits: Tensor = self.head(self.bag(texts))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.bag, self.head]


class _Bag(nn.Module):
    def __init__(self, width: int, buckets: int, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.table, self.buckets, self.lengths = nn.Embedding(buckets, width), buckets, lengths

    def forward(self, texts: Tensor) -> Tensor:
        """(B, T) -> (B, D); zeros of an empty text."""
        x = texts.long()
        x = torch.where((x >= ord("A")) & (x <= ord("Z")), x + 32, x)
        grams = torch.cat([self._numbers(x, length) for length in self.lengths], 1)  # (B, G)
        counts = (x != 0).repeat(1, len(self.lengths))[..., None]  # (B, G, 1)
        total = self.table(grams).where(counts, 0.0).sum(1)
        mean: Tensor = total / counts.sum(1).clamp(min=1)
        return mean

    def _numbers(self, x: Tensor, length: int) -> Tensor:
        """Return the bucket (B, T) of the n-gram that begins at each byte."""
        padded, hashed = F.pad(x, (0, length - 1)), torch.zeros_like(x) + length
        for place in range(length):
            hashed = (hashed * 257 + padded[:, place : place + x.shape[1]]) % PRIME
        return hashed * FACTOR // 2**16 % self.buckets
