"""Keys and values of tokens that were seen before."""

import torch
from torch import Tensor

from apprentice.errors import BadInput


class Cache:
    """Keys and values of up to `max_length` tokens that one causal attention layer has seen, for generation.

    Use one for each layer and batch of texts. It starts empty and grows by the tokens of x with each
    `SelfAttention.forward(x, cache)`; `length` is their number, and the position of the next. It holds no gradients:
    generate under `torch.no_grad()`.

    Args:
        max_length: tokens of a text at most.
        padding: (B,) int64, tokens before the first of each text, to which no token of the text attends; None for none.

    Raises:
        BadInput: it is full, holds another number of texts, or gradients are on.
    """

    def __init__(self, max_length: int, padding: Tensor | None = None) -> None:
        self.max_length, self.padding, self.length = max_length, padding, 0
        self._stored: Tensor | None = None  # (2, B, heads, max_length, D / heads): keys, then values

    def mask(self, count: int, device: torch.device) -> Tensor | None:
        """Return which cached tokens the last `count` attend to, (count, length) or (B, 1, count, length).

        None if that is all of them, or is what a causal kernel does by itself.
        """
        last = torch.arange(self.length - count, self.length, device=device)[:, None]
        slots = torch.arange(self.length, device=device)
        if self.padding is None:
            return None if count in {1, self.length} else slots <= last
        # A token of padding attends to itself: a softmax of nothing would be NaN in some kernels.
        seen: Tensor = (slots <= last) & ((slots >= self.padding[:, None, None]) | (slots == last))
        return seen[:, None]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (B, heads, t, D / heads); return those of all tokens (B, heads, length, D / heads)."""
        if keys.requires_grad:
            raise BadInput("", "a cache holds no gradients", "a call under torch.no_grad()")
        end = self.length + keys.shape[2]
        if end > self.max_length:
            raise BadInput("max_length", self.max_length, f"at least {end}, the tokens to be cached")
        if self._stored is None:
            self._stored = keys.new_empty(2, *keys.shape[:2], self.max_length, keys.shape[3])
        elif len(keys) != self._stored.shape[1]:
            raise BadInput("", f"{len(keys)} texts", f"the {self._stored.shape[1]} whose tokens are cached")
        self._stored[0, :, :, self.length : end], self._stored[1, :, :, self.length : end] = keys, values
        self.length = end
        return self._stored[0, :, :, :end], self._stored[1, :, :, :end]
