"""Cutting a global batch into shards, and merging what each makes of BatchNorm's statistics."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

FEWEST = 8  # rows of a shard from which BatchNorm takes its statistics


def bounds(size: int, parts: int) -> list[int]:
    """`parts` + 1 places at which `size` is cut as evenly as can be, the longer pieces first."""
    share, rest = divmod(size, parts)
    return [i * share + min(i, rest) for i in range(parts + 1)]


def spans(size: int, parts: int, fewest: int = 1) -> list[tuple[int, int]]:
    """First row and last row + 1 of each of `parts` shards of a batch of `size` rows.

    Where there are too few rows for all, some shards are empty, and those that are not lie evenly among them.

    Args:
        size: rows of the batch.
        parts: number of shards.
        fewest: rows of a shard that is not empty, if the batch has so many.
    """
    used = min(parts, max(1, size // fewest))
    cuts = bounds(size, used)
    return list(pairwise(cuts[-(-i * used // parts)] for i in range(parts + 1)))


def fewest_rows(module: nn.Module) -> int:
    """Rows that a shard has to have: some more where BatchNorm takes statistics of them, as one or two tell nothing."""
    layers = (m for m in module.modules() if isinstance(m, _BatchNorm))
    return FEWEST if any(m.training or m.running_mean is None for m in layers) else 1


def rows(batch: Any) -> int:
    """The number of rows of a batch: the first dimension of its tensors.

    Raises:
        ValueError: it has no tensor, or tensors of several lengths, of which it names one each.
    """
    lengths = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(lengths) != 1:
        leaves = [(path, leaf) for path, leaf in _named_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        first = {len(leaf): f"batch{path} has {len(leaf)}" for path, leaf in reversed(leaves)}
        found = ", ".join(first[length] for length in sorted(first)) or "there is none"
        raise ValueError(f"expected a batch of tensors with one number of rows; {found}")
    return lengths.pop()


def _named_leaves(batch: Any) -> list[tuple[str, Any]]:
    try:
        return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(batch)[0]]
    except ValueError:  # it holds a class that torch can take apart, but whose parts have no names
        return [("", leaf) for leaf in tree_leaves(batch)]


def part(batch: Any, start: int, stop: int) -> Any:
    """The rows from `start` to `stop`; a batch that has a `part` of its own cuts itself."""
    if hasattr(batch, "part"):
        return batch.part(start, stop)
    count = rows(batch)

    def texts(node: Any) -> bool:
        listed = type(node) in {list, tuple} and len(node) == count
        return listed and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node))

    def cut(leaf: Any) -> Any:
        return leaf[start:stop] if texts(leaf) or (isinstance(leaf, Tensor) and leaf.dim()) else leaf

    return tree_map(cut, batch, is_leaf=texts)


def share(batch: Any) -> float:
    """What the mean over a replica's rows counts, so that the mean over replicas is the one over all rows.

    A batch whose rows are dealt unevenly says it; else replicas are taken to have equally many.
    """
    return getattr(batch, "share", 1.0)


def mean_over_rows(table: Tensor, sizes: Sequence[int]) -> Tensor:
    """(k,) means over all rows, from the means (n, k) over pieces of `sizes` rows; added in the pieces' order."""
    total = torch.zeros_like(table[0])
    for means, size in zip(table, sizes, strict=True):
        if size:
            total += means * size
    return total / sum(sizes)


class RunningStatistics:
    """What BatchNorm keeps of the batches it has seen: each shard starts from the same, and their results are merged.

    Args:
        *modules: whose normalisation layers count, if they are in training.
    """

    def __init__(self, *modules: nn.Module) -> None:
        layers = [m for module in modules for m in module.modules() if isinstance(m, _NormBase) and m.training]
        self._buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._start = [buffer.clone() for buffer in self._buffers]
        self._others = {
            name: (buffer, buffer._version)
            for module in modules
            for name, buffer in module.named_buffers()
            if not buffer.is_inference() and not any(buffer is mine for mine in self._buffers)
        }
        self.size = sum(buffer.numel() for buffer in self._buffers)

    def take(self) -> list[Tensor]:
        """What a shard has made of them, (size,) float64 in pieces; they are set back to the start.

        Raises:
            ValueError: another buffer has changed, which nothing could merge.
        """
        changed = [name for name, (buffer, version) in self._others.items() if buffer._version != version]
        if changed:
            raise ValueError(f"expected training steps that change no buffer but BatchNorm's; {changed[0]} has changed")
        found = [buffer.to(torch.float64, copy=True).flatten() for buffer in self._buffers]
        for buffer, start in zip(self._buffers, self._start, strict=True):
            buffer.data.copy_(start)  # `data`: autograd has saved it, and refuses what it sees change
        return found

    def put(self, merged: Tensor) -> None:
        """Set them to merged ones, (size,) float64."""
        for buffer, values in zip(
            self._buffers, merged.split([buffer.numel() for buffer in self._buffers]), strict=True
        ):
            buffer.copy_(values.view_as(buffer).round() if not buffer.is_floating_point() else values.view_as(buffer))
