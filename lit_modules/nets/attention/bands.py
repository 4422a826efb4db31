"""Sliding windows in bands: a block of queries beside the keys that it sees, in time and memory linear in the text."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.attention.masks import CausalMask
from lit_modules.nets.attention.positions import alibi_bias

SHORTEST = 512  # tokens of a text that is cut: shorter ones are no slower with a mask
BLOCK = 64  # queries of a block at least
Part = tuple[Tensor, Tensor, Tensor, Tensor | CausalMask]


def uses_bands(mask: CausalMask, length: int) -> bool:
    """Return whether a text of this length is computed in bands, which is faster there (docs/attention.md)."""
    if mask.window is None or (mask.sinks and mask.slopes is not None):
        return False  # blocks share one bias, but their distances to sinks differ
    return length >= max(SHORTEST, 2 * (mask.window + mask.sinks))


def cut_bands(query: Tensor, key: Tensor, value: Tensor, mask: CausalMask) -> list[Part]:
    """Cut attention (B, H, T, d) with a window into calls of attention: of the first queries, and of the n blocks.

    The first queries are as many as leave whole blocks, each with `window` - 1 keys before it that are no sinks: one
    mask is that of all blocks. Blocks are small, since a query's products with all keys of its block's band count, but
    no smaller than a quarter of the window, whose keys each of them copies.

    Returns:
        Twice queries (b, H, t, d), keys and values (b, K, m, d) and their mask; b is B, and then B n, block by block.
    """
    assert mask.window is not None
    length, before = query.shape[2], mask.window - 1
    size = max(BLOCK, mask.window // 4)
    first = before + mask.sinks + (length - before - mask.sinks) % size
    start = query[:, :, :first], key[:, :, :first], value[:, :, :first]
    queries = query[:, :, first:].unflatten(2, (-1, size)).transpose(1, 2)  # (B, n, H, size, d)
    rows = [_bands(x, first - before, before + size, size, mask.sinks) for x in (key, value)]
    blocks = queries.flatten(0, 1), *(x.flatten(0, 1) for x in rows)
    return [(*start, mask), (*blocks, _mask_of_blocks(mask, size, query))]


def join_bands(parts: list[Tensor], batch: int) -> Tensor:
    """Return (B, H, T, d) of what attention made of the two calls."""
    first, blocks = parts
    return torch.cat([first, blocks.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)], 2)


def _bands(x: Tensor, start: int, width: int, step: int, sinks: int) -> Tensor:
    """Return (B, n, K, sinks + width, d) of keys (B, K, T, d): sinks, and those from `start` on, a step a block."""
    bands = x[:, :, start:].unfold(2, width, step).permute(0, 2, 1, 4, 3)
    if not sinks:
        return bands
    first = x[:, None, :, :sinks].expand(-1, bands.shape[1], -1, -1, -1)
    return torch.cat([first, bands], 3)


def _mask_of_blocks(mask: CausalMask, size: int, like: Tensor) -> Tensor:
    """Return (size, sinks + window - 1 + size) bool, or with slopes (1, H, ...) to be added to scores."""
    assert mask.window is not None
    before = mask.window - 1
    queries, keys = (torch.arange(n, device=like.device) for n in (size, before + size))
    queries = queries + before
    distance = queries[:, None] - keys
    seen = (distance >= 0) & (distance < mask.window)
    if mask.slopes is not None:
        return alibi_bias(queries, keys, mask.slopes).masked_fill(~seen, -torch.inf)
    return F.pad(seen, (mask.sinks, 0), value=True)
