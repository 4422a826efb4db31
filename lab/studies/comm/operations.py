"""The operations of the study: messages and collectives of torch.distributed, with expected results and bandwidths.

Sizes and bandwidths are defined as in nccl-tests. The size S is that of a rank's largest buffer: an all-gather's
output, a reduce-scatter's input, all parts of a gather at the root. Algorithm bandwidth is S over the time of a call;
bus bandwidth is that times a factor, after which a perfect ring of n ranks has the speed of its links for any n.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ITEM = 4  # bytes of a float32


@dataclass(frozen=True)
class Member:
    """A rank in the group that is measured."""

    group: Any  # torch's
    ranks: Sequence[int]  # the members' numbers in the world; the last is the root of rooted collectives
    rank: int  # this one's number in the group
    device: torch.device  # where tensors are

    @property
    def is_root(self) -> bool:
        return self.rank == len(self.ranks) - 1


def numbers(rank: int, count: int) -> Tensor:
    """Return the numbers (count,) that a rank sends: different for each rank, and exact in every sum."""
    return (torch.arange(count) % 97 + 100 * rank).float()


def powers(rank: int, count: int) -> Tensor:
    """Return powers of two (count,), 1/2, 1 and 2, whose products are exact."""
    return ((torch.arange(count) + rank) % 3 + 1).exp2() / 4


@dataclass(frozen=True)
class Operation:
    """A message or collective: each rank sends x and receives y, one tensor where the operation works in place."""

    bind: Callable[[Member, Tensor, Tensor], Callable[[], Any]]  # a call on x and y
    expected: Callable[[Member, Sequence[Tensor]], Tensor]  # y, from the x of all ranks
    sends_part: bool = False  # whether x is a part of the whole, one for each rank
    receives_part: bool = False  # whether y is
    in_place: bool = False
    receives: Callable[[Member], bool] = lambda _: True  # whether a rank has a y
    data: Callable[[int, int], Tensor] = numbers  # the x of a rank, of so many numbers
    bus: Callable[[int], float] = lambda _: 1.0  # from algorithm to bus bandwidth, for n ranks
    reduces_all: bool = False  # whether it is an all-reduce, for which there are several rings
    sends: bool = True  # whether it sends anything
    trips: int = 1  # how often data travel in a call

    def tensors(self, member: Member, count: int) -> tuple[Tensor, Tensor]:
        """Make x with this rank's data, and y; the largest buffer has `count` numbers, a multiple of the ranks."""
        part = count // len(member.ranks)
        x = self.data(member.rank, part if self.sends_part else count).to(member.device)
        return x, x if self.in_place else torch.empty(part if self.receives_part else count, device=member.device)

    def is_correct(self, member: Member, x: Tensor, y: Tensor) -> bool:
        """Return whether this rank's y, if it has one, equals the expected result of the first call to the bit."""
        sent = [self.data(rank, len(x)).to(x.device) for rank in range(len(member.ranks))]
        return not self.receives(member) or torch.equal(y, self.expected(member, sent))


def send_recv(member: Member, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Send from the first rank to the second and back."""
    calls = [(dist.send, x), (dist.recv, y)]

    def run() -> None:
        for call, tensor in calls if member.rank == 0 else calls[::-1]:
            call(tensor, member.ranks[1 - member.rank], member.group)

    return run if member.rank < 2 else lambda: None


def isend_irecv(member: Member, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Send from each rank to the next, all at the same time."""
    after, before = (member.ranks[(member.rank + step) % len(member.ranks)] for step in (1, -1))

    def run() -> None:
        sent, received = dist.P2POp(dist.isend, x, after, member.group), dist.P2POp(dist.irecv, y, before, member.group)
        for request in dist.batch_isend_irecv([sent, received]):
            request.wait()

    return run


def all_reduce(op: Any, combine: Callable[[Tensor, Tensor], Tensor], **options: Any) -> Operation:
    """Return the all-reduce with one of torch's reductions."""
    return Operation(
        lambda member, x, _: partial(dist.all_reduce, x, op, group=member.group),
        lambda _, sent: reduce(combine, sent),
        in_place=True, bus=lambda n: 2 * (n - 1) / n, reduces_all=True, **options,
    )  # fmt: skip


def split_at_root(member: Member, x: Tensor) -> list[Tensor] | None:
    """Return the parts of the root's tensor; None on other ranks."""
    return list(x.chunk(len(member.ranks))) if member.is_root else None


# In rooted collectives the root is the group's last rank.
BUS: dict[str, Any] = {"bus": lambda n: (n - 1) / n}  # where a part stays on its rank
OPERATIONS: dict[str, Operation] = {
    "send_recv": Operation(
        send_recv, lambda m, sent: sent[1 - m.rank], receives=lambda m: m.rank < 2, trips=2
    ),
    "isend_irecv": Operation(isend_irecv, lambda m, sent: sent[m.rank - 1]),
    "broadcast": Operation(
        lambda m, x, _: partial(dist.broadcast, x, m.ranks[-1], m.group), lambda _, sent: sent[-1], in_place=True
    ),
    "reduce": Operation(
        lambda m, x, _: partial(dist.reduce, x, m.ranks[-1], group=m.group),
        lambda _, sent: reduce(torch.add, sent), in_place=True, receives=lambda m: m.is_root,
    ),
    "all_reduce_sum": all_reduce(dist.ReduceOp.SUM, torch.add),
    "all_reduce_product": all_reduce(dist.ReduceOp.PRODUCT, torch.mul, data=powers),
    "all_reduce_max": all_reduce(dist.ReduceOp.MAX, torch.maximum),
    "all_reduce_min": all_reduce(dist.ReduceOp.MIN, torch.minimum),
    "scatter": Operation(
        lambda m, x, y: partial(dist.scatter, y, split_at_root(m, x), m.ranks[-1], m.group),
        lambda m, sent: sent[-1].chunk(len(m.ranks))[m.rank], receives_part=True, **BUS,
    ),
    "gather": Operation(
        lambda m, x, y: partial(dist.gather, x, split_at_root(m, y), m.ranks[-1], m.group),
        lambda _, sent: torch.cat(tuple(sent)), sends_part=True, receives=lambda m: m.is_root, **BUS,
    ),
    "all_gather": Operation(
        lambda m, x, y: partial(dist.all_gather_into_tensor, y, x, m.group),
        lambda _, sent: torch.cat(tuple(sent)), sends_part=True, **BUS,
    ),
    "reduce_scatter": Operation(
        lambda m, x, y: partial(dist.reduce_scatter_tensor, y, x, group=m.group),
        lambda m, sent: reduce(torch.add, sent).chunk(len(m.ranks))[m.rank], receives_part=True, **BUS,
    ),
    "all_to_all": Operation(
        lambda m, x, y: partial(dist.all_to_all_single, y, x, group=m.group),
        lambda m, sent: torch.cat([x.chunk(len(m.ranks))[m.rank] for x in sent]), **BUS,
    ),
    "barrier": Operation(
        lambda m, _x, _y: partial(dist.barrier, m.group), lambda _, sent: sent[0], receives=lambda _: False, sends=False
    ),
}  # fmt: skip
