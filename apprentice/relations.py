"""Functions that relate all rows of a global batch, with gradients, whichever ranks or shards hold these rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from apprentice import replicas
from apprentice.private import tree_flatten, tree_unflatten

Values = dict[str, Tensor]  # each (n,)
# From a tree of tensors (B, ...), all rows in order, to the rows' losses (B,), and values that are only logged.
Relation = Callable[[Any], tuple[Tensor, Values]]

_shards: ContextVar["ShardedRelations | None"] = ContextVar("shards", default=None)


def relate(relation: Relation, tree: Any, rows: Tensor, count: int) -> tuple[Tensor, Values]:
    """Compute losses (b,) and values (b,) of some rows of a global batch by a function of all rows.

    The function is called once a global batch on every rank, with the same bits, outside of the ranks' autograd graphs.
    The losses' gradient is that of the sum of *all* rows' losses with respect to these rows. This is right for a loss
    that is their mean over the global batch, with equal weights.

    Args:
        relation: the function; it may change state, alike on all ranks.
        tree: tensors (b, ...) of these rows; gradients reach those that require them.
        rows: (b,) int64, the rows' positions in the global batch; b may be 0.
        count: B, the rows of the global batch. Inside a shard of an exact step the strategy knows it.
    """
    if (shards := _shards.get()) is not None:
        return shards.relate(relation, tree, rows)
    call = _Call(relation, tree, count)
    call.put(tree, rows)
    call.compute()
    return call.result(tree, rows)


class ShardedRelations:
    """Relations of a global batch of `count` rows whose shards are computed one by one, in two passes.

    The first pass gathers what the shards relate; `compute` relates it; in the second pass each shard gets the losses
    of its rows, and their gradient. All ranks make the same calls of `relate` in a shard. A rank without a shard
    computes another rank's in the first pass, with `is_mine` false.
    """

    def __init__(self, count: int) -> None:
        self._count, self._calls = count, list[_Call]()
        self._number, self._gathers = 0, True

    @contextmanager
    def shard(self, is_mine: bool = True) -> Iterator[None]:
        """Inside, a shard is computed, in either pass."""
        self._number, self._gathers = 0, is_mine
        token = _shards.set(self)
        try:
            yield
        finally:
            _shards.reset(token)

    def relate(self, relation: Relation, tree: Any, rows: Tensor) -> tuple[Tensor, Values]:
        """Do what the function `relate` does, inside a shard."""
        if self._number == len(self._calls):
            self._calls.append(_Call(relation, tree, self._count))
        call = self._calls[self._number]
        self._number += 1
        if call.losses is None and self._gathers:
            call.put(tree, rows)
        return call.result(tree, rows)

    def compute(self) -> None:
        """Relate the rows of all shards, on all ranks."""
        for call in self._calls:
            call.compute()


class _Call:
    """One relation of a global batch: the rows that it relates, later its result."""

    def __init__(self, relation: Relation, tree: Any, count: int) -> None:
        leaves, self.form = tree_flatten(tree)
        self.relation = relation
        self.whole = [x.new_zeros(count, *x.shape[1:]) for x in leaves]
        self.requires_grad = [x.requires_grad for x in leaves]
        self.losses: Tensor | None = None

    def put(self, tree: Any, rows: Tensor) -> None:
        for whole, x in zip(self.whole, tree_flatten(tree)[0], strict=True):
            whole[rows] = x.detach()

    def compute(self) -> None:
        whole = _sum_over_ranks(self.whole)
        with torch.enable_grad():
            leaves = [x.requires_grad_(needed) for x, needed in zip(whole, self.requires_grad, strict=True)]
            losses, values = self.relation(tree_unflatten(leaves, self.form))
            if losses.requires_grad:
                losses.sum().backward()  # `grad` fails where modules are traced, as by a counter of operations
        self.gradients = [x.grad for x in leaves]
        self.losses, self.values, self.whole = losses.detach(), {k: v.detach() for k, v in values.items()}, []

    def result(self, tree: Any, rows: Tensor) -> tuple[Tensor, Values]:
        if self.losses is None:  # of a shard in the first pass, whose results are not used
            return torch.zeros(len(rows), device=rows.device), {}
        pairs = [(x, g) for x, g in zip(tree_flatten(tree)[0], self.gradients, strict=True) if x.requires_grad]
        gradients = [None if g is None else g[rows] for _, g in pairs]
        losses: Any = _WithGradients.apply(self.losses[rows], gradients, *(x for x, _ in pairs))
        return losses, {name: values[rows] for name, values in self.values.items()}


class _WithGradients(torch.autograd.Function):
    """Losses (b,) whose gradients with respect to tensors (b, ...) are known; None is zero."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, gradients: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients, ctx.like = gradients, [x.to("meta") for x in tensors]
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> Any:
        def weigh(gradient: Tensor | None, like: Tensor) -> Tensor:
            if gradient is None:
                return torch.zeros_like(like, device=weights.device)
            return (gradient * weights.view(-1, *[1] * (gradient.dim() - 1))).to(like.dtype)

        return None, None, *(weigh(g, like) for g, like in zip(ctx.gradients, ctx.like, strict=True))


def _sum_over_ranks(tensors: list[Tensor]) -> list[Tensor]:
    """Sum over the ranks, which hold different rows: exact. One collective for each type."""
    sums = dict[int, Tensor]()
    for dtype in {x.dtype: None for x in tensors}:
        members = {number: x for number, x in enumerate(tensors) if x.dtype == dtype}
        total = replicas.all_reduce_sum_(torch.cat([x.flatten() for x in members.values()]))
        parts = total.split([x.numel() for x in members.values()])
        sums |= {n: part.view_as(x) for (n, x), part in zip(members.items(), parts, strict=True)}
    return [sums[number].detach() for number in range(len(tensors))]
