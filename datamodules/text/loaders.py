"""Batches of texts of unequal lengths: filled up to the longest, or several texts packed into a row."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from apprentice import keyed
from apprentice.batch import IGNORED, Batch, label_mask
from datamodules.loaders import EpochOrder, Resumable
from datamodules.text.token_files import TokenizedTexts

LossPer = Literal["token", "sequence"]
SORTED_AT_ONCE = 64  # batches among which texts are sorted by length


class LengthOrder(EpochOrder):
    """Batches of texts of about one length: an epoch's order is sorted among so many batches, whose order is drawn.

    `lengths` (n,) are the texts'. Only the last batch may be smaller, as in any order.
    """

    def __init__(self, lengths: Tensor, batch_size: int, *options: Any) -> None:
        super().__init__(len(lengths), *options)
        self.lengths, self.batch_size = lengths, batch_size

    def indices(self) -> Tensor:
        drawn = super().indices()
        windows = drawn.split(self.batch_size * SORTED_AT_ONCE)
        in_order = torch.cat([window[self.lengths[window].argsort(stable=True)] for window in windows])
        whole = len(in_order) // self.batch_size
        batches = in_order[: whole * self.batch_size].view(whole, self.batch_size)
        shuffled = batches[keyed.permutation(whole, self.key, 1)]
        return torch.cat([shuffled.flatten(), in_order[whole * self.batch_size :]])


@dataclass(eq=False)
class TextLoader(Resumable):
    """This rank's rows of each global batch of texts, in the sampler's order.

    Rows of all ranks are as long as the longest text of the global batch, so that a row has the same bits wherever it
    is computed. A batch's `label_weight` follows from the texts' numbers of tokens, without a message between ranks.

    Args:
        pack: put the texts of a global batch into as few such rows as they fit in, whole.
        loss_per: what counts alike in a loss, each `token` of a response or each `sequence`.
    """

    texts: TokenizedTexts
    batch_size: int
    sampler: EpochOrder
    rank: int = 0
    replicas: int = 1
    pack: bool = False
    loss_per: LossPer = "token"

    def __len__(self) -> int:
        return math.ceil(len(self.sampler) / self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        # As a generator it reads the position with the first batch; Lightning calls iter() long before.
        epoch, start, order = self.sampler.epoch, self.sampler.start(), self.sampler.indices()
        for number in range(start, len(self)):
            first = number * self.batch_size
            yield self.batch(order[first : first + self.batch_size], first, epoch * len(self) + number)

    def batch(self, whole: Tensor, first: int = 0, step: int = 0) -> Batch:
        """Return this rank's rows of the global batch of texts at places `whole` (n,), from `first` in the order."""
        length = int(self.texts.lengths[whole].max())
        packed = pack_texts(self.texts.lengths[whole].tolist()) if self.pack else [[i] for i in range(len(whole))]
        rows = self.sampler.share(first, len(packed), self.rank, self.replicas)
        mine = [whole[packed[row]] for row in rows.tolist()]
        index = torch.stack([places[0] for places in mine]) if mine else whole[:0]
        weight = len(packed) * length / int(self.texts.labels[whole].sum())
        if not self.pack:
            inputs, labels = self.texts.take(index, length)
            batch = Batch(inputs, labels, index, rows, len(packed), self.replicas, step, weight)
            starts = torch.zeros_like(labels)
        else:
            inputs, labels, starts, texts = self._fill_rows(mine, length)
            batch = Batch(
                inputs, labels, index, rows, len(packed), self.replicas, step, weight, starts=starts, texts=texts
            )
        if self.loss_per == "token":
            return batch
        return batch._replace(label_weight=weigh_sequences(labels, starts, len(packed) / len(whole)))

    def _fill_rows(self, mine: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs, labels, starts and texts (b, T) of rows with the texts at these places."""
        shape = len(mine), length
        inputs, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
        starts, texts = torch.zeros(shape, dtype=torch.int64), torch.full(shape, -1)
        for row, places in enumerate(mine):
            end = 0
            for place in places.tolist():
                begin, end = end, end + int(self.texts.lengths[place])
                text = self.texts.take(torch.tensor([place]))
                inputs[row, begin:end], labels[row, begin:end] = text.inputs[0], text.labels[0]
                starts[row, begin:end], texts[row, begin:end] = begin, place
            starts[row, end:] = end
        return inputs, labels, starts, texts


def pack_texts(lengths: Sequence[int]) -> list[list[int]]:
    """Return rows of places in `lengths`: each text, the longest first, goes to the first row with room for it.

    A row has room for the longest text. First-fit decreasing (D. S. Johnson 1973) takes at most 11/9 of the fewest
    rows, and 1.
    """
    room, rows = np.zeros(0, np.int64), list[list[int]]()
    for place in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = np.flatnonzero(room >= lengths[place])
        if not len(fits):
            room, fits = np.append(room, max(lengths)), np.array([len(rows)])
            rows.append([])
        rows[fits[0]].append(place)
        room[fits[0]] -= lengths[place]
    return rows


def weigh_sequences(labels: Tensor, starts: Tensor, rows_per_text: float) -> Tensor:
    """Return (b, T) float64, weights by which each text counts alike: see `Batch.label_weight`.

    Args:
        labels: (b, T), of which those count that are no IGNORED.
        starts: (b, T), for each token the place in its row where its text begins.
        rows_per_text: of the global batch.
    """
    counts = label_mask(labels)
    of_text = torch.zeros(labels.shape, dtype=torch.float64).scatter_add_(
        1, starts.clamp(max=labels.shape[1] - 1), counts.double()
    )
    tokens = of_text.gather(1, starts.clamp(max=labels.shape[1] - 1)).clamp(min=1)
    return counts * (labels.shape[1] * rows_per_text / tokens)
