"""What is measured: each message and collective of torch.distributed, how its result is checked, what it moves.

Sizes and bandwidths are those of nccl-tests. The size S is that of the largest buffer of a rank: of an all-gather's
output, a reduce-scatter's input, all parts of a gather at the root. Algorithm bandwidth is S over the time of a call;
bus bandwidth is that times a factor, after which a perfect ring of n ranks has the speed of its links for any n.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the group that is measured.

    Attributes:
        group: torch's.
        ranks: the members' numbers in the world.
        rank: this one's number in the group.
        device: where tensors are.
    """

    group: Any
    ranks: Sequence[int]
    rank: int
    device: torch.device

    @property
    def size(self) -> int:
        """How many ranks the group has."""
        return len(self.ranks)

    def data(self, rank: int, count: int) -> Tensor:
        """(count,) what that rank sends: others than any other rank, and exact in every sum."""
        return (torch.arange(count, device=self.device) % 97 + 100 * rank).float()

    def powers(self, rank: int, count: int) -> Tensor:
        """(count,) powers of two, of which every product is exact."""
        return ((torch.arange(count, device=self.device) + rank) % 3 + 1).exp2() / 4  # 1/2, 1 and 2


class Case(NamedTuple):
    """An operation on tensors that are there.

    Attributes:
        run: calls it once.
        expected: of `tensors`, after the first call.
        tensors: where its result is on this rank; none where it has none.
        buffers: all tensors that it uses.
        trips: times that the data travel in a call, where that is more than once.
    """

    run: Callable[[], Any]
    expected: Callable[[], list[Tensor]]
    tensors: list[Tensor]
    buffers: list[Tensor]
    trips: int = 1

    def is_right(self) -> bool:
        """Whether the result is, to the bit, what it has to be."""
        return all(map(torch.equal, self.tensors, self.expected()))


@dataclass(frozen=True)
class Operation:
    """One of those that are measured.

    Attributes:
        make: makes the case of a rank, for a buffer of so many numbers, which the number of ranks divides.
        bus: from algorithm to bus bandwidth, for n ranks.
        reduces_all: whether it is an all-reduce, for which there are several rings.
        sized: whether there is anything to send.
    """

    make: Callable[[Place, int], Case]
    bus: Callable[[int], float]
    reduces_all: bool = False
    sized: bool = True


def _once(_n: int) -> float:
    return 1.0


def _all_but_own(n: int) -> float:
    return (n - 1) / n


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


def _nothing() -> list[Tensor]:
    return []


# Messages


def send_recv(place: Place, count: int) -> Case:
    """From the first rank to the second and back."""
    if place.rank > 1:
        return Case(lambda: None, _nothing, [], [], trips=2)
    x, y = place.data(place.rank, count), torch.empty(count, device=place.device)
    other = place.ranks[1 - place.rank]

    def run() -> None:
        if place.rank == 0:
            dist.send(x, other, place.group)
            dist.recv(y, other, place.group)
        else:
            dist.recv(y, other, place.group)
            dist.send(x, other, place.group)

    return Case(run, lambda: [place.data(1 - place.rank, count)], [y], [x, y], trips=2)


def isend_irecv(place: Place, count: int) -> Case:
    """From each rank to the next, all at the same time."""
    x, y = place.data(place.rank, count), torch.empty(count, device=place.device)
    after, before = ((place.rank + step) % place.size for step in (1, -1))

    def run() -> None:
        operations = [
            dist.P2POp(dist.isend, x, place.ranks[after], place.group),
            dist.P2POp(dist.irecv, y, place.ranks[before], place.group),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    return Case(run, lambda: [place.data(before, count)], [y], [x, y])


# Collectives; the root is the group's last rank


def all_reduce(op: Any, combine: Callable[[Tensor, Tensor], Tensor], powers: bool = False) -> Operation:
    """The operation with one of torch's reductions."""

    def make(place: Place, count: int) -> Case:
        data = place.powers if powers else place.data
        x = data(place.rank, count)

        def expected() -> list[Tensor]:
            return [functools.reduce(combine, (data(rank, count) for rank in range(place.size)))]

        return Case(lambda: dist.all_reduce(x, op, group=place.group), expected, [x], [x])

    return Operation(make, _twice, reduces_all=True)


def broadcast(place: Place, count: int) -> Case:
    """From the root to all."""
    root = place.size - 1
    x = place.data(place.rank, count)
    run = functools.partial(dist.broadcast, x, place.ranks[root], place.group)
    return Case(run, lambda: [place.data(root, count)], [x], [x])


def reduce(place: Place, count: int) -> Case:
    """The sum, on the root."""
    root = place.size - 1
    x = place.data(place.rank, count)

    def expected() -> list[Tensor]:
        return [functools.reduce(torch.add, (place.data(rank, count) for rank in range(place.size)))]

    run = functools.partial(dist.reduce, x, place.ranks[root], dist.ReduceOp.SUM, place.group)
    there = place.rank == root
    return Case(run, expected if there else _nothing, [x] if there else [], [x])


def scatter(place: Place, count: int) -> Case:
    """A part from the root to each."""
    root, part = place.size - 1, count // place.size
    parts = [place.data(rank, part) for rank in range(place.size)] if place.rank == root else []
    x = torch.empty(part, device=place.device)
    run = functools.partial(dist.scatter, x, parts or None, place.ranks[root], place.group)
    return Case(run, lambda: [place.data(place.rank, part)], [x], [x, *parts])


def gather(place: Place, count: int) -> Case:
    """A part from each to the root."""
    root, part = place.size - 1, count // place.size
    x = place.data(place.rank, part)
    parts = [torch.empty_like(x) for _ in range(place.size)] if place.rank == root else []
    run = functools.partial(dist.gather, x, parts or None, place.ranks[root], place.group)
    return Case(run, lambda: [place.data(rank, part) for rank in range(len(parts))], parts, [x, *parts])


def all_gather(place: Place, count: int) -> Case:
    """A part from each to all."""
    part = count // place.size
    x, whole = place.data(place.rank, part), torch.empty(count, device=place.device)
    run = functools.partial(dist.all_gather_into_tensor, whole, x, place.group)
    return Case(run, lambda: [place.data(rank, part) for rank in range(place.size)], [*whole.split(part)], [x, whole])


def reduce_scatter(place: Place, count: int) -> Case:
    """A part of the sum to each."""
    part = count // place.size
    x, mine = place.data(place.rank, count), torch.empty(part, device=place.device)

    def expected() -> list[Tensor]:
        total = functools.reduce(torch.add, (place.data(rank, count) for rank in range(place.size)))
        return [total.split(part)[place.rank]]

    run = functools.partial(dist.reduce_scatter_tensor, mine, x, dist.ReduceOp.SUM, place.group)
    return Case(run, expected, [mine], [x, mine])


def all_to_all(place: Place, count: int) -> Case:
    """A part from each to each."""
    part = count // place.size
    x, received = place.data(place.rank, count), torch.empty(count, device=place.device)

    def expected() -> list[Tensor]:
        return [place.data(rank, count).split(part)[place.rank] for rank in range(place.size)]

    run = functools.partial(dist.all_to_all_single, received, x, group=place.group)
    return Case(run, expected, [*received.split(part)], [x, received])


def barrier(place: Place, _count: int) -> Case:
    """Nothing, until all are there."""
    return Case(lambda: dist.barrier(place.group), _nothing, [], [])


OPERATIONS: dict[str, Operation] = {
    "send_recv": Operation(send_recv, _once),
    "isend_irecv": Operation(isend_irecv, _once),
    "broadcast": Operation(broadcast, _once),
    "reduce": Operation(reduce, _once),
    "all_reduce_sum": all_reduce(dist.ReduceOp.SUM, torch.add),
    "all_reduce_product": all_reduce(dist.ReduceOp.PRODUCT, torch.mul, powers=True),
    "all_reduce_max": all_reduce(dist.ReduceOp.MAX, torch.maximum),
    "all_reduce_min": all_reduce(dist.ReduceOp.MIN, torch.minimum),
    "scatter": Operation(scatter, _all_but_own),
    "gather": Operation(gather, _all_but_own),
    "all_gather": Operation(all_gather, _all_but_own),
    "reduce_scatter": Operation(reduce_scatter, _all_but_own),
    "all_to_all": Operation(all_to_all, _all_but_own),
    "barrier": Operation(barrier, _once, sized=False),
}
