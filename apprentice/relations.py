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
# Takes a tree of tensors (B, ...), all rows in order; gives the rows' losses (B,), and values that are only logged.
Relation = Callable[[Any], tuple[Tensor, Values]]

_shards: ContextVar["ShardedRelations | None"] = ContextVar("shards", default=None)


def related(relation: Relation, tree: Any, rows: Tensor, count: int) -> tuple[Tensor, Values]:
    """Losses (b,) and values (b,) of some rows of a global batch, by a function of all rows.

    The function is called once a global batch on every rank, with the same bits, outside of the ranks' autograd graphs.
    The losses' gradient is that of the sum of *all* rows' losses with respect to these rows: right for a loss that is
    their mean over the global batch, in which all weigh the same.

    Args:
        relation: the function; it may change state, which stays the same on all ranks.
        tree: tensors (b, ...) of these rows; floats that require gradients get them.
        rows: (b,) int64, the rows' positions in the global batch; b may be 0.
        count: B, the rows of the global batch. Inside a shard of `--exact` the strategy knows it.
    """
    if (shards := _shards.get()) is not None:
        return shards.related(relation, tree, rows)
    call = _Call(relation, tree, count)
    call.put(tree, rows)
    call.compute()
    return call.of(tree, rows)


class ShardedRelations:
    """The relations of a global batch of `count` rows whose shards are computed one by one, in two passes.

    The first gathers what the shards relate; `compute` relates it; in the second each shard gets the losses of its
    rows, and their gradient. All ranks make the same calls of `related` in a shard; one that has no shard computes
    another's in the first pass, with `own` false.
    """

    def __init__(self, count: int) -> None:
        self._count, self._calls = count, list[_Call]()
        self._number, self._own = 0, True

    @contextmanager
    def shard(self, own: bool = True) -> Iterator[None]:
        """Inside, a shard is computed, in either pass."""
        self._number, self._own = 0, own
        token = _shards.set(self)
        try:
            yield
        finally:
            _shards.reset(token)

    def related(self, relation: Relation, tree: Any, rows: Tensor) -> tuple[Tensor, Values]:
        """The function `related` inside a shard."""
        if self._number == len(self._calls):
            self._calls.append(_Call(relation, tree, self._count))
        call = self._calls[self._number]
        self._number += 1
        if call.losses is None and self._own:
            call.put(tree, rows)
        return call.of(tree, rows)

    def compute(self) -> None:
        """Relate the rows of all shards, on all ranks."""
        for call in self._calls:
            call.compute()


class _Call:
    """One relation of a global batch: what has been gathered for it, later its result."""

    def __init__(self, relation: Relation, tree: Any, count: int) -> None:
        leaves, self.form = tree_flatten(tree)
        self.relation = relation
        self.whole = [x.new_zeros(count, *x.shape[1:]) for x in leaves]
        self.wanted = [x.requires_grad for x in leaves]
        self.losses: Tensor | None = None

    def put(self, tree: Any, rows: Tensor) -> None:
        for whole, x in zip(self.whole, tree_flatten(tree)[0], strict=True):
            whole[rows] = x.detach()

    def compute(self) -> None:
        whole = _summed(self.whole)
        with torch.enable_grad():
            leaves = [x.requires_grad_(wanted) for x, wanted in zip(whole, self.wanted, strict=True)]
            losses, values = self.relation(tree_unflatten(leaves, self.form))
            if losses.requires_grad:
                losses.sum().backward()  # `grad` fails where modules are traced, as by a counter of operations
        self.gradients = [x.grad for x in leaves]
        self.losses, self.values, self.whole = losses.detach(), {k: v.detach() for k, v in values.items()}, []

    def of(self, tree: Any, rows: Tensor) -> tuple[Tensor, Values]:
        if self.losses is None:  # of a shard in the first pass, whose results are not used
            return torch.zeros(len(rows), device=rows.device), {}
        pairs = zip(tree_flatten(tree)[0], self.gradients, strict=True)
        own = [(x, None if g is None else g[rows]) for x, g in pairs if x.requires_grad]
        losses: Any = _WithGradients.apply(self.losses[rows], [g for _, g in own], *(x for x, _ in own))
        return losses, {name: values[rows] for name, values in self.values.items()}


class _WithGradients(torch.autograd.Function):
    """Losses (b,) whose gradients with respect to tensors (b, ...) are known; None is zero."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, gradients: list[Tensor | None], *tensors: Tensor) -> Tensor:
        ctx.gradients, ctx.like = gradients, [x.to("meta") for x in tensors]
        return losses.clone()

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> Any:
        def weighted(gradient: Tensor | None, like: Tensor) -> Tensor:
            if gradient is None:
                return torch.zeros_like(like, device=weights.device)
            return (gradient * weights.view(-1, *[1] * (gradient.dim() - 1))).to(like.dtype)

        return None, None, *(weighted(g, like) for g, like in zip(ctx.gradients, ctx.like, strict=True))


def _summed(tensors: list[Tensor]) -> list[Tensor]:
    """The sums over the ranks, each of which holds other rows: exact. One collective for each type."""
    found = dict[int, Tensor]()
    for dtype in {x.dtype: None for x in tensors}:
        members = {number: x for number, x in enumerate(tensors) if x.dtype == dtype}
        total = replicas.all_reduce_sum_(torch.cat([x.flatten() for x in members.values()]))
        parts = total.split([x.numel() for x in members.values()])
        found |= {n: part.view_as(x) for (n, x), part in zip(members.items(), parts, strict=True)}
    return [found[number].detach() for number in range(len(tensors))]
