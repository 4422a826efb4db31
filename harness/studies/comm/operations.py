"""The operations of the study: messages and collectives of torch.distributed, their expected results, what they move.

Sizes and bandwidths are those of nccl-tests. The size S is that of the largest buffer of a rank: of an all-gather's
output, a reduce-scatter's input, all parts of a gather at the root. Algorithm bandwidth is S over the time of a call;
bus bandwidth is that times a factor, after which a perfect ring of n ranks has the speed of its links for any n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Member:
    """A rank in the group that is measured."""

    group: Any  # torch's
    ranks: Sequence[int]  # the members' numbers in the world
    rank: int  # this one's number in the group
    device: torch.device  # where tensors are

    @property
    def size(self) -> int:
        """Ranks of the group; the last is the root of rooted collectives."""
        return len(self.ranks)

    @property
    def is_root(self) -> bool:
        """Whether this is the root."""
        return self.rank == self.size - 1

    def data(self, rank: int, count: int) -> Tensor:
        """(count,) what that rank sends: different for each rank, and exact in every sum."""
        return (torch.arange(count, device=self.device) % 97 + 100 * rank).float()

    def all_data(self, count: int) -> list[Tensor]:
        """What each rank sends."""
        return [self.data(rank, count) for rank in range(self.size)]

    def powers(self, rank: int, count: int) -> Tensor:
        """(count,) powers of two, whose products are exact."""
        return ((torch.arange(count, device=self.device) + rank) % 3 + 1).exp2() / 4  # 1/2, 1 and 2

    def empty(self, count: int) -> Tensor:
        """(count,) for what is received."""
        return torch.empty(count, device=self.device)


class Call(NamedTuple):
    """An operation on its tensors."""

    run: Callable[[], Any]  # calls it once
    expected: Callable[[], list[Tensor]] = list  # of `tensors`, after the first call
    tensors: Sequence[Tensor] = ()  # this rank's results, if any
    buffers: Sequence[Tensor] = ()  # all tensors that it uses
    trips: int = 1  # how often data travel in a call

    def is_correct(self) -> bool:
        """Whether the results are as expected, to the bit."""
        return all(map(torch.equal, self.tensors, self.expected()))


@dataclass(frozen=True)
class Operation:
    """What can be measured."""

    make: Callable[[Member, int], Call]  # a rank's call for so many numbers, a multiple of the ranks
    bus: Callable[[int], float] = lambda _: 1.0  # from algorithm to bus bandwidth, for n ranks
    reduces_all: bool = False  # whether it is an all-reduce, for which there are several rings
    sized: bool = True  # whether it sends anything


# Messages


def send_recv(member: Member, count: int) -> Call:
    """From the first rank to the second and back."""
    if member.rank > 1:
        return Call(lambda: None, trips=2)
    x, y = member.data(member.rank, count), member.empty(count)
    other = member.ranks[1 - member.rank]
    calls = [(dist.send, x), (dist.recv, y)]

    def run() -> None:
        for call, tensor in calls if member.rank == 0 else calls[::-1]:
            call(tensor, other, member.group)

    return Call(run, lambda: [member.data(1 - member.rank, count)], [y], [x, y], trips=2)


def isend_irecv(member: Member, count: int) -> Call:
    """From each rank to the next, all at the same time."""
    x, y = member.data(member.rank, count), member.empty(count)
    after, before = ((member.rank + step) % member.size for step in (1, -1))

    def run() -> None:
        sent = dist.P2POp(dist.isend, x, member.ranks[after], member.group)
        received = dist.P2POp(dist.irecv, y, member.ranks[before], member.group)
        for request in dist.batch_isend_irecv([sent, received]):
            request.wait()

    return Call(run, lambda: [member.data(before, count)], [y], [x, y])


# Collectives; the root is the group's last rank


def all_reduce(op: Any, combine: Callable[[Tensor, Tensor], Tensor], powers: bool = False) -> Operation:
    """The operation with one of torch's reductions."""

    def make(member: Member, count: int) -> Call:
        data = member.powers if powers else member.data
        x = data(member.rank, count)

        def expected() -> list[Tensor]:
            return [reduce(combine, (data(rank, count) for rank in range(member.size)))]

        return Call(partial(dist.all_reduce, x, op, group=member.group), expected, [x], [x])

    return Operation(make, lambda n: 2 * (n - 1) / n, reduces_all=True)


def broadcast(member: Member, count: int) -> Call:
    """From the root to all."""
    x = member.data(member.rank, count)
    run = partial(dist.broadcast, x, member.ranks[-1], member.group)
    return Call(run, lambda: [member.data(member.size - 1, count)], [x], [x])


def reduce_to_root(member: Member, count: int) -> Call:
    """The sum, on the root."""
    x = member.data(member.rank, count)
    run = partial(dist.reduce, x, member.ranks[-1], dist.ReduceOp.SUM, member.group)
    return Call(run, lambda: [reduce(torch.add, member.all_data(count))], [x] if member.is_root else [], [x])


def scatter(member: Member, count: int) -> Call:
    """A part from the root to each."""
    part = count // member.size
    parts, x = member.all_data(part) if member.is_root else [], member.empty(part)
    run = partial(dist.scatter, x, parts or None, member.ranks[-1], member.group)
    return Call(run, lambda: [member.data(member.rank, part)], [x], [x, *parts])


def gather(member: Member, count: int) -> Call:
    """A part from each to the root."""
    x = member.data(member.rank, count // member.size)
    parts = [torch.empty_like(x) for _ in range(member.size)] if member.is_root else []
    run = partial(dist.gather, x, parts or None, member.ranks[-1], member.group)
    return Call(run, lambda: member.all_data(len(x)), parts, [x, *parts])


def all_gather(member: Member, count: int) -> Call:
    """A part from each to all."""
    part = count // member.size
    x, whole = member.data(member.rank, part), member.empty(count)
    run = partial(dist.all_gather_into_tensor, whole, x, member.group)
    return Call(run, lambda: member.all_data(part), whole.split(part), [x, whole])


def reduce_scatter(member: Member, count: int) -> Call:
    """A part of the sum to each."""
    part = count // member.size
    x, mine = member.data(member.rank, count), member.empty(part)
    run = partial(dist.reduce_scatter_tensor, mine, x, dist.ReduceOp.SUM, member.group)
    return Call(run, lambda: [reduce(torch.add, member.all_data(count)).split(part)[member.rank]], [mine], [x, mine])


def all_to_all(member: Member, count: int) -> Call:
    """A part from each to each."""
    part = count // member.size
    x, received, rank = member.data(member.rank, count), member.empty(count), member.rank
    run = partial(dist.all_to_all_single, received, x, group=member.group)
    parts = received.split(part)
    return Call(run, lambda: [data.split(part)[rank] for data in member.all_data(count)], parts, [x, received])


def _parts(n: int) -> float:
    return (n - 1) / n


OPERATIONS: dict[str, Operation] = {
    "send_recv": Operation(send_recv),
    "isend_irecv": Operation(isend_irecv),
    "broadcast": Operation(broadcast),
    "reduce": Operation(reduce_to_root),
    "all_reduce_sum": all_reduce(dist.ReduceOp.SUM, torch.add),
    "all_reduce_product": all_reduce(dist.ReduceOp.PRODUCT, torch.mul, powers=True),
    "all_reduce_max": all_reduce(dist.ReduceOp.MAX, torch.maximum),
    "all_reduce_min": all_reduce(dist.ReduceOp.MIN, torch.minimum),
    "scatter": Operation(scatter, _parts),
    "gather": Operation(gather, _parts),
    "all_gather": Operation(all_gather, _parts),
    "reduce_scatter": Operation(reduce_scatter, _parts),
    "all_to_all": Operation(all_to_all, _parts),
    "barrier": Operation(lambda member, _count: Call(partial(dist.barrier, member.group)), sized=False),
}
