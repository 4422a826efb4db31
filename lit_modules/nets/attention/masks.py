"""Which keys a query attends to."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets.attention.positions import alibi_bias


def mask_texts(starts: Tensor) -> Tensor:
    """Return (B, 1, T, T) bool, true where a key is no later than a query and of the same text (see `Batch.starts`)."""
    places = torch.arange(starts.shape[1], device=starts.device)
    return ((starts[:, :, None] == starts[:, None]) & (places[:, None] >= places))[:, None]


def visible(
    queries: Tensor, keys: Tensor, window: int | None = None, sinks: int = 0, padding: Tensor | None = None
) -> Tensor:
    """Return (t, n) or (B, 1, t, n) bool: which of the keys at places (n,) or (B, n) the queries at (t,) attend to.

    Keys j of a query i: 0 <= i - j, and with a window i - j < window or j among the first `sinks` tokens (StreamingLLM,
    arXiv:2309.17453). A text's first token is at its `padding` (B,); a token before it attends to itself alone, because
    a softmax of nothing is NaN in some kernels.
    """
    i, j = queries[:, None], keys[..., None, :]  # (t, 1), (1, n) or (B, 1, n)
    first: Tensor | int = 0 if padding is None else padding[:, None, None]
    seen = j <= i
    if window is not None:
        near = i - j < window
        seen = seen & (near | (j < first + sinks) if sinks else near)
    if padding is not None:
        seen = seen & ((j >= first) | (j == i))
    return seen if seen.dim() == 2 else seen[:, None]


def check_mask(mask: Tensor, batch: int, heads: int, tokens: int, keys: int) -> Tensor:
    """Return a mask as one that broadcasts to (B, H, T, keys); boolean (B, keys) says which keys are no padding.

    Raises:
        BadInput: it is neither boolean nor floating point, or of another shape.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise BadInput("mask", mask.dtype, "bool, true where a query attends to a key, or floating point to be added")
    if mask.dtype == torch.bool and mask.shape == (batch, keys):
        return mask[:, None, None]
    if mask.dim() == 4 and all(
        size in {1, full} for size, full in zip(mask.shape, (batch, heads, tokens, keys), strict=True)
    ):
        return mask
    expected = f"a mask that broadcasts to (B, H, T, keys), {(batch, heads, tokens, keys)}, with these four dimensions"
    raise BadInput("mask", tuple(mask.shape), f"{expected}, or bool (B, keys), false for padding")


def narrow(mask: Tensor, causal: bool, window: int | None = None, sinks: int = 0) -> tuple[Tensor, Tensor]:
    """Narrow a mask (B, H, T, T), each size or 1, to earlier tokens and the window.

    Sinks are the first keys that the mask leaves a query: those of its own text in a row of several texts.

    Returns:
        The mask, with which every query attends to some key, and (B, H, T, 1) bool, true for those to which it left
        none: their attention is to be replaced by 0, since a softmax of nothing is NaN in some kernels.
    """
    allowed = mask if mask.dtype == torch.bool else mask > -math.inf
    seen = allowed
    if causal:
        places = torch.arange(mask.shape[-1], device=mask.device)
        seen = seen & visible(places, places)
        if window is not None:
            near = places[:, None] - places < window
            seen = seen & (near | (allowed.cumsum(-1) <= sinks) if sinks else near)
    empty = ~seen.any(-1, keepdim=True)
    if mask.dtype == torch.bool:
        return seen | empty, empty
    return mask.masked_fill(~seen, -math.inf).masked_fill(empty, 0.0), empty


@dataclass(frozen=True)
class CausalMask:
    """What the queries of a whole text see of it, as rules, from which each kernel makes what it takes.

    Attributes:
        window: a token sees itself and the `window` - 1 before it; None for all.
        sinks: the first tokens of a text, which all see beside their window.
        slopes: (H,) of `Alibi`, in the type of the scores; None for no bias.
    """

    window: int | None = None
    sinks: int = 0
    slopes: Tensor | None = None

    def tensor(self, length: int, device: torch.device) -> Tensor:
        """Return (T, T) bool; with slopes (1, H, T, T), to be added to scores."""
        places = torch.arange(length, device=device)
        seen = visible(places, places, self.window, self.sinks)
        if self.slopes is None:
            return seen
        return alibi_bias(places, places, self.slopes).masked_fill(~seen, -math.inf)
