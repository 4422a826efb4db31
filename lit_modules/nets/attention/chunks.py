"""Tokens cut into chunks, as the chunked forms of linear attention compute them, and which texts tokens belong to."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from apprentice.private import scan_dimension
from lit_modules.nets.attention.masks import mask_texts

Step = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]


class Chunks:
    """How T tokens are cut into n chunks of C; the last one is filled up with zeros, which change no state.

    A state is a sum over the tokens of one text. `starts` says where a text begins, and so which tokens a chunk's
    state is of; without it all tokens continue the text of the state before them.

    Args:
        length: T; 0 makes no chunk.
        size: C; one chunk of T if T is smaller.
        starts: (B, T) int64, the place of the first token of each token's text; below 0 for one before these T.
        device: of the tokens.

    Attributes:
        earlier: bool, true where the second token is not after the first, and of its text: (C, C) or (B, 1, n, C, C).
    """

    def __init__(self, length: int, size: int, starts: Tensor | None, device: torch.device) -> None:
        self.length, self.size = length, max(min(size, length), 1)
        self.filling = -length % self.size
        self.earlier = torch.ones(self.size, self.size, dtype=torch.bool, device=device).tril()
        self._continues: Tensor | None = None  # (B, 1, n, C, 1), whether a token is of the text before its chunk
        if starts is None:
            return
        starts = torch.cat([starts, starts[:, -1:].expand(-1, self.filling)], 1).unflatten(1, (-1, self.size))
        begin = torch.arange(0, length, self.size, device=device)
        self._continues = (starts < begin[:, None])[:, None, :, :, None]
        self._remains = (starts == starts[..., -1:])[:, None, :, :, None]  # of the text in which its chunk ends
        self.earlier = self.earlier & (starts[..., :, None] == starts[..., None, :])[:, None]

    def cut(self, x: Tensor) -> Tensor:
        """(B, H, T, d) -> (B, H, n, C, d)."""
        chunks: Tensor = F.pad(x, (0, 0, 0, self.filling)).unflatten(2, (-1, self.size))
        return chunks

    def join(self, x: Tensor) -> Tensor:
        """(B, H, n, C, d) -> (B, H, T, d)."""
        return x.flatten(2, 3)[:, :, : self.length]

    def reads(self, x: Tensor) -> Tensor:
        """Set x (B, H, n, C, d) to 0 for tokens that don't read the state before their chunk."""
        return x if self._continues is None else x * self._continues

    def writes(self, x: Tensor) -> Tensor:
        """Set x (B, H, n, C, d) to 0 for tokens that are not part of the state after their chunk."""
        return x if self._continues is None else x * self._remains

    def passes(self, x: Tensor) -> Tensor:
        """Set x (B, H, n, ., .), factors of the state before a chunk, to 0 if the chunk ends in another text."""
        return x if self._continues is None else x * self._continues[..., -1:, :]


def scan(factors: Tensor, summands: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each of n chunks (B, H, n, f, e) and after the last (B, H, f, e).

    Chunk by chunk: state ← factor · state + summand, with factors (B, H, n, f or 1, e or 1).
    """
    return fold(lambda before, parts: (before, parts[0] * before + parts[1]), state, factors, summands)


def fold(step: Step, state: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return a step's outputs (B, H, n, ...) for each of n chunks, and the state (B, H, f, e) after the last.

    Args:
        step: makes an output (B, H, ...) and the next state of the state and a chunk's parts.
        state: before the first chunk.
        parts: (B or 1, H or 1, n, ...) each.
    """
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        # The compiler would unroll the loop, to a graph for each number of chunks.
        return scan_dimension(step, state, parts, 2)
    if not parts[0].shape[2]:
        output, _ = step(state, [x.sum(2) for x in parts])  # of the shape that a chunk's has
        return output[:, :, None][:, :, :0], state
    outputs = []
    for chunk in zip(*(x.unbind(2) for x in parts), strict=True):
        output, state = step(state, chunk)
        outputs.append(output)
    return torch.stack(outputs, 2), state


def restart(state: Tensor, starts: Tensor | None, place: int) -> Tensor:
    """Set the state (B, H, f, e) to 0 in rows where a text begins at this place of `starts` (B, T)."""
    return state if starts is None else state.masked_fill((starts[:, place] == place)[:, None, None, None], 0)


def find_starts(mask: Tensor | None, rows: int, length: int) -> Tensor | None:
    """Return the place (B, T) where each token's text begins, as a mask says it; None for one text a row.

    Args:
        mask: (B, T) int64, these places; (B, T) bool, false for padding before or after a text; (B, 1, T, T) bool, what
            `mask_texts` makes of the places. Padding before a text is a text of its own, which no token reads.
        rows: B.
        length: T.

    Raises:
        BadInput: the mask is another one. Under `torch.compile` shape and type are checked, not the values.
    """
    if mask is None:
        return None
    places, traced = torch.arange(length, device=mask.device), torch.compiler.is_compiling()
    shape, is_bool = tuple(mask.shape), mask.dtype == torch.bool
    if shape == (rows, length) and mask.dtype == torch.int64:
        return mask
    if shape == (rows, length) and is_bool:
        if traced or bool((mask.diff(dim=1, prepend=mask.new_zeros(rows, 1)) & mask).sum(1).le(1).all()):
            first = mask.int().argmax(1, keepdim=True)
            return first.where(places >= first, 0)
        raise BadInput("mask", "(B, T) with padding inside a text", "padding before or after it: a state skips none")
    if shape in {(rows, 1, length, length), (1, 1, length, length)} and is_bool:
        starts = mask[:, 0].int().argmax(-1)
        if traced or torch.equal(mask, mask_texts(starts)):
            return starts.expand(rows, -1)
        raise BadInput("mask", shape, "one of causal texts (mask_texts): linear attention sees all of a text up to now")
    kind = str(mask.dtype).removeprefix("torch.")
    expected = f"({rows}, {length}) bool or int64 starts, or ({rows}, 1, {length}, {length}) bool of causal texts"
    raise BadInput("mask", f"{shape} {kind}", expected)
