"""The backend `ring` gives what gloo gives, sends what its algorithms say, and fails as torch's own do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lab.strategies.ring import algorithms
from lab.strategies.ring.algorithms import TAG
from tests.grids import mostly_slow
from tests.ranks import in_ranks

SIZES = (1, 7, 24, 200)
DTYPES = (torch.float64, torch.bfloat16, torch.int64, torch.uint8)
OPS = {
    "sum": dist.ReduceOp.SUM, "product": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND, "bor": dist.ReduceOp.BOR, "bxor": dist.ReduceOp.BXOR,
}  # fmt: skip


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Small integers, of which sums and products are exact; others on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def all_reduced(op: Any, x: Tensor) -> Callable[[Any], Tensor]:
    def collective(group: Any) -> Tensor:
        y = x.clone()
        assert dist.all_reduce(y, op, group=group) is None
        return y

    return collective


@in_ranks(*mostly_slow([1, 2, 3, 8], 1, 3))
def test_reductions_are_gloos() -> None:
    algorithms.PIECE = 16  # bytes: so that small tensors travel in many pieces
    gloo = dist.new_group(backend="gloo")
    for name, op in OPS.items():
        bitwise = name.startswith("b")
        for dtype in DTYPES[2:] if bitwise else DTYPES:
            for size in SIZES if dist.get_world_size() < 8 else SIZES[1:2]:
                collective = all_reduced(op, numbers(size, dtype=dtype))
                ours, theirs = collective(None), collective(gloo)
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=f"{name} {dtype} {size}")
                assert ours.dtype == dtype
    x = numbers(23)
    y = x.clone()
    dist.all_reduce(y, dist.ReduceOp.AVG)
    assert torch.equal(y, all_reduced(dist.ReduceOp.SUM, x)(gloo) / dist.get_world_size())
    dist.all_reduce(torch.empty(0))


def objects(n: int, rank: int, group: Any) -> list[Any]:
    gathered: list[Any] = [None] * n
    dist.all_gather_object(gathered, {"rank": rank}, group)
    message = ["from the last" if rank == n - 1 else None]
    dist.broadcast_object_list(message, n - 1, group)
    return [*gathered, *message]


@in_ranks(*mostly_slow([1, 2, 3, 8], 1, 3))
def test_collectives_are_gloos() -> None:
    algorithms.PIECE = 16
    n, rank = dist.get_world_size(), dist.get_rank()
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float64, torch.bool):
        for size in SIZES:
            for collective in collectives(n, rank, size, dtype):
                ours, theirs = collective(None), collective(gloo)
                call = f"{collective.__name__} of {size} {dtype}"
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=call)
    assert objects(n, rank, None) == [{"rank": r} for r in range(n)] + ["from the last"]
    dist.barrier()


def collectives(n: int, rank: int, size: int, dtype: torch.dtype) -> list[Callable[[Any], Any]]:
    """Each with a root other than the first, where it has one."""
    root = n - 1
    x = numbers(size, dtype=dtype)
    parts = [numbers(size, dtype=dtype, seed=i) for i in range(n)]

    def broadcast(group: Any) -> Tensor:
        dist.broadcast(y := x.clone(), root, group)
        return y

    def reduce(group: Any) -> Tensor | None:
        dist.reduce(y := x.clone(), root, dist.ReduceOp.MAX, group)
        return y if rank == root else None

    def all_gather(group: Any) -> list[Tensor]:
        dist.all_gather(gathered := [torch.zeros_like(x) for _ in range(n)], x, group)
        return gathered

    def all_gather_into_tensor(group: Any) -> Tensor:
        stacked, joined = torch.zeros(n, size, dtype=dtype), torch.zeros(n * size, dtype=dtype)
        dist.all_gather_into_tensor(joined, x, group)
        if group is None:  # gloo has no other form
            dist.all_gather_into_tensor(stacked, x, group)
            assert torch.equal(stacked.flatten(), joined)
        return joined

    def gather(group: Any) -> list[Tensor]:
        gathered = [torch.zeros_like(x) for _ in range(n if rank == root else 0)]
        dist.gather(x, gathered or None, root, group)
        return gathered

    def scatter(group: Any) -> Tensor:
        dist.scatter(y := torch.zeros_like(x), parts if rank == root else None, root, group)
        return y

    def reduce_scatter(group: Any) -> list[Tensor]:
        before = [part.clone() for part in parts]
        dist.reduce_scatter(y := torch.zeros_like(x), parts, dist.ReduceOp.MAX, group)
        dist.reduce_scatter_tensor(z := torch.zeros_like(x), torch.cat(parts), dist.ReduceOp.MAX, group)
        assert all(map(torch.equal, parts, before))
        return [y, z]

    def all_to_all(group: Any) -> list[Tensor]:
        if group is None or n == 1:
            dist.all_to_all(received := [torch.zeros_like(x) for _ in range(n)], parts, group)
            return received
        whole = torch.zeros(n * size, dtype=dtype)  # gloo has no other
        dist.all_to_all_single(whole, torch.cat(parts), group=group)
        return list(whole.chunk(n))

    def all_to_all_single(group: Any) -> list[Tensor]:
        even, uneven = torch.zeros(n * size, dtype=dtype), torch.zeros(sum(range(n)) + n * rank + n, 2, dtype=dtype)
        dist.all_to_all_single(even, torch.cat(parts), group=group)
        sizes = [[rank + other + 1 for other in range(n)]] * 2  # rows from r to s: r + s + 1
        dist.all_to_all_single(uneven, numbers(*uneven.shape, dtype=dtype), *sizes, group=group)
        return [even, uneven]

    found = [broadcast, all_gather, all_gather_into_tensor, gather, scatter, all_to_all_single]
    found += [] if n == 1 else [all_to_all]
    return found if dtype == torch.bool else [*found, reduce, reduce_scatter]


# How tensors may lie


@in_ranks(3)
def test_tensors_lie_as_they_like() -> None:
    n, total = dist.get_world_size(), sum(range(1, dist.get_world_size() + 1))
    mine = torch.full((4, 3), float(dist.get_rank() + 1))
    whole = torch.zeros(4, 6)
    whole[:, ::2] = mine
    for x in (mine.t(), whole[:, ::2], mine.view(1, 4, 3, 1).contiguous(memory_format=torch.channels_last)):
        dist.all_reduce(x)
        assert (x == total).all()
        x.fill_(dist.get_rank() + 1)
    assert not whole[:, 1::2].any()
    with torch.inference_mode():
        dist.all_reduce(x := torch.ones(3))
        assert (x == n).all()
    p = torch.nn.Parameter(torch.full((3,), float(dist.get_rank())))
    dist.broadcast(p.data, n - 1)
    dist.broadcast(p, n - 1)
    assert (p == n - 1).all()
    x, seen = torch.ones(6).view(2, 3).t(), [torch.zeros(2, 3).t() for _ in range(n)]
    dist.all_gather(seen, x)
    assert all(torch.equal(part, x) for part in seen)
    dist.all_reduce(torch.zeros(0))


# Messages


@in_ranks(3)
def test_messages_and_collectives_do_not_meet() -> None:
    n, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % n, (rank - 1) % n
    x, y = torch.full((3,), float(rank)), torch.zeros(3)
    received = dist.irecv(y, before)
    dist.all_reduce(torch.ones(1))  # neither takes the other's messages
    dist.isend(x, after).wait()
    received.wait()
    assert (y == before).all()
    first, second = torch.zeros(3), torch.zeros(3)
    requests = [dist.irecv(second, before, tag=2), dist.irecv(first, before, tag=1)]
    dist.send(x, after, tag=1)
    dist.send(x + 10, after, tag=2)
    for request in requests:
        request.wait()
    assert (first == before).all()
    assert (second == before + 10).all()
    operations = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y.zero_(), before)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    assert (y == before).all()
    if rank == 0:
        seen = {dist.recv(y) for _ in range(n - 1)}  # from anyone
        assert seen == set(range(1, n))
    else:
        dist.send(x, 0)
    with pytest.raises(ValueError, match=f"tag {TAG}: expected a smaller one"):
        dist.send(x, after, tag=TAG)


# Calls that don't wait


@in_ranks(2)
def test_calls_that_do_not_wait_keep_their_order() -> None:
    n = dist.get_world_size()
    xs = [torch.full((5,), float(i)) for i in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    dist.all_reduce(last := torch.ones(1))  # waits, and so comes after them
    assert all(work.is_completed() and work.is_success() for work in works)
    assert all((x == n * i).all() for i, x in enumerate(xs))
    assert (last == n).all()
    x = torch.ones(3)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] / n)
    assert torch.equal(future.wait(), torch.ones(3))

    def again(_done: Any) -> Tensor:
        dist.all_reduce(x)
        return x

    future = dist.all_reduce(x.fill_(1), async_op=True).get_future().then(again)  # a collective in what follows on one
    assert torch.equal(future.wait(), torch.full((3,), float(n * n)))
    dist.barrier(async_op=True).wait()
    others = [torch.zeros(2) for _ in range(n)]
    handle = dist.all_gather(others, torch.full((2,), float(dist.get_rank())), async_op=True)
    if dist.get_rank() == 0:
        dist.recv(x, 1)
    elif dist.get_rank() == 1:
        dist.send(x, 0)
    handle.wait()
    assert [float(other[0]) for other in others] == list(range(n))


# Groups


@in_ranks(3, backend="gloo")
def test_a_group_of_some_ranks() -> None:
    rank = dist.get_rank()
    assert dist.get_backend() == "gloo"
    some = dist.new_group([0, 2], backend="ring")
    alone = dist.new_group([1], backend="ring")
    if rank == 1:
        dist.all_reduce(x := torch.ones(2), group=alone)
        assert (x == 1).all()
        dist.barrier()
        return
    assert dist.get_backend(some) == "ring"
    assert dist.get_world_size(some) == 2
    dist.all_reduce(x := torch.full((3,), float(rank)), group=some)
    assert (x == 2).all()
    dist.broadcast(x := torch.full((3,), float(rank)), 2, group=some)  # by its number in the world
    assert (x == 2).all()
    if rank == 0:
        dist.send(torch.full((1,), 7.0), 2, group=some)
    else:
        dist.recv(y := torch.zeros(1), 0, group=some)
        assert y.item() == 7
    dist.barrier(some)
    dist.destroy_process_group(some)
    dist.barrier()  # a rank that leaves early would be missed by others that are still connecting
