"""Cuts a global batch into shards, and averages over them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apprentice.batch import Batch
from apprentice.contract import HasParts, layout_of
from apprentice.errors import BadInput
from apprentice.private import BatchNorm, tree_leaves, tree_map
from apprentice.replicas import FEWEST_ROWS
from strategies.base.private import keystr, tree_flatten_with_path


class Shard(NamedTuple):
    """Rows `start` to `stop` of a global batch, its shard `number`."""

    number: int
    start: int
    stop: int
    batch: Any

    @property
    def rows(self) -> int:
        return self.stop - self.start


def bounds(size: int, parts: int) -> list[int]:
    """`parts` + 1 indices that cut `size` rows as evenly as possible, the longer pieces first."""
    share, rest = divmod(size, parts)
    return [i * share + min(i, rest) for i in range(parts + 1)]


def spans(size: int, parts: int, fewest: int = 1) -> list[tuple[int, int]]:
    """First row and last row + 1 of each of `parts` shards; some are empty if there are too few rows for `fewest`."""
    used = min(parts, max(1, size // fewest))
    cuts = bounds(size, used)
    return list(pairwise(cuts[-(-i * used // parts)] for i in range(parts + 1)))


def fewest_rows(module: nn.Module) -> int:
    """Return the rows that a shard needs: 1, or more if BatchNorm computes statistics of them or the layout says so."""
    layers = (m for m in module.modules() if isinstance(m, BatchNorm))
    has_statistics = any(m.training or m.running_mean is None for m in layers)
    return max(FEWEST_ROWS if has_statistics else 1, layout_of(module).fewest_rows)


def rows(batch: Any) -> int:
    """Return the first dimension of a batch's tensors; BadInput where they have several lengths, or there is none."""
    if isinstance(batch, Batch):
        return len(batch.rows)
    try:
        leaves = [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(batch)[0]]
    except ValueError:  # a class registered without names for its children
        leaves = [("", leaf) for leaf in tree_leaves(batch)]
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    by_length = {len(leaf): f"batch{path} has {len(leaf)}" for path, leaf in reversed(tensors)}
    if len(by_length) != 1:
        lengths = ", ".join(by_length[length] for length in sorted(by_length)) or "there is none"
        raise BadInput("", "batch", f"tensors with one number of rows; {lengths}")
    return next(iter(by_length))


def part(batch: Any, start: int, stop: int) -> Any:
    """Return the rows `start` to `stop` of a batch, by its method `part` if it has one."""
    if isinstance(batch, HasParts):
        return batch.part(start, stop)
    count = rows(batch)

    def is_list_of_rows(node: Any) -> bool:
        listed = type(node) in {list, tuple} and len(node) == count
        return listed and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node))

    def cut(leaf: Any) -> Any:
        return leaf[start:stop] if is_list_of_rows(leaf) or (isinstance(leaf, Tensor) and leaf.dim()) else leaf

    return tree_map(cut, batch, is_leaf=is_list_of_rows)


def mean_over_rows(table: Tensor, sizes: Sequence[int]) -> Tensor:
    """(k,) means over all rows, from the means (n, k) over pieces of `sizes` rows; added in the pieces' order."""
    total = torch.zeros_like(table[0])
    for means, size in zip(table, sizes, strict=True):
        if size:
            total += means * size
    return total / sum(sizes)
