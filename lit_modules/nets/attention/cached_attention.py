"""What softmax attention of all forms shares: a cache if it is causal, and how a mask is read."""

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.attention.cache import Cache
from lit_modules.nets.attention.masks import check_mask, narrow


class CachedAttention(nn.Module):
    """Attention of texts that, where it is causal, can be continued token by token.

    Attributes:
        causal: whether a token attends only to itself and earlier tokens.
        window: a token attends to itself and the `window` - 1 before it; None for all.
        sinks: the first tokens of a text stay visible beyond the window.
    """

    causal: bool
    window: int | None = None
    sinks: int = 0

    def new_cache(self, max_length: int, padding: Tensor | None = None) -> Cache:
        """Return an empty cache for texts of up to `max_length` tokens; with a window it keeps only what that needs."""
        if not self.causal:
            raise BadInput("causal", False, "True: only causal attention has a cache")
        return Cache(max_length, padding, self.window, self.sinks)

    def check_input(self, x: Tensor, cache: Cache | None, mask: Tensor | None) -> None:
        """Raise BadInput for nested tensors, and for a cache beside a mask or of attention that is not causal."""
        if x.is_nested:
            raise BadInput("x", "nested tensors", "texts of one length (B, T, D), padded and masked")
        self.check_cache(cache, mask)

    def check_cache(self, cache: Cache | None, mask: Tensor | None) -> None:
        """Raise BadInput for a cache beside a mask, of another window, or of attention that is not causal."""
        if cache is not None and not self.causal:
            raise BadInput("cache", "a Cache", "None, but for causal attention over texts of one length (B, T, D)")
        if cache is None:
            return
        if not isinstance(cache, Cache):
            raise BadInput("cache", type(cache).__name__, f"what new_cache() of {type(self).__name__} makes")
        if mask is not None:
            raise BadInput("mask", tuple(mask.shape), "None with a cache, whose `padding` says what is no text")
        if cache.window is not None and (cache.window, cache.sinks) != (self.window, self.sinks):
            raise BadInput("cache", f"a Cache of window {cache.window}", f"the layer's window, {self.window}")

    def narrow_mask(
        self, x: Tensor, mask: Tensor | None, heads: int, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Narrow a mask for so many heads to earlier tokens; also return the queries that see nothing."""
        if mask is None:
            return None, None
        mask = check_mask(mask, x.shape[0], heads, x.shape[1], x.shape[1])
        return narrow(mask if mask.dtype == torch.bool else mask.to(dtype), self.causal, self.window, self.sinks)
