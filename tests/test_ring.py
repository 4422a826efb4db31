"""The backend `ring` gives what gloo gives, sends what its algorithms say, and fails as torch's own do."""

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from strategies import ring, roll_call
from strategies.ring import algorithms
from strategies.ring.links import TAG, Links
from strategies.ring.queue import Collective, Queue
from tests.processes import launch
from tests.ranks import ranks

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


def every_reduction() -> None:
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


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_reductions_are_gloos(size: int) -> None:
    ranks(size, every_reduction)


def objects(n: int, rank: int, group: Any) -> list[Any]:
    found: list[Any] = [None] * n
    dist.all_gather_object(found, {"rank": rank}, group)
    told = ["from the last" if rank == n - 1 else None]
    dist.broadcast_object_list(told, n - 1, group)
    return [*found, *told]


def every_collective() -> None:
    algorithms.PIECE = 16
    n, rank = dist.get_world_size(), dist.get_rank()
    gloo = dist.new_group(backend="gloo")
    for dtype in (torch.float64, torch.bool):
        for size in SIZES:
            for collective in collectives(n, rank, size, dtype):
                ours, theirs = collective(None), collective(gloo)
                said = f"{collective.__name__} of {size} {dtype}"
                torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=said)
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
        dist.all_gather(found := [torch.zeros_like(x) for _ in range(n)], x, group)
        return found

    def all_gather_into_tensor(group: Any) -> Tensor:
        stacked, joined = torch.zeros(n, size, dtype=dtype), torch.zeros(n * size, dtype=dtype)
        dist.all_gather_into_tensor(joined, x, group)
        if group is None:  # gloo has no other form
            dist.all_gather_into_tensor(stacked, x, group)
            assert torch.equal(stacked.flatten(), joined)
        return joined

    def gather(group: Any) -> list[Tensor]:
        found = [torch.zeros_like(x) for _ in range(n if rank == root else 0)]
        dist.gather(x, found or None, root, group)
        return found

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
            dist.all_to_all(found := [torch.zeros_like(x) for _ in range(n)], parts, group)
            return found
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


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_collectives_are_gloos(size: int) -> None:
    ranks(size, every_collective)


# How tensors may lie


def any_tensor() -> None:
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


def test_tensors_lie_as_they_like() -> None:
    ranks(3, any_tensor)


# Messages


def messages() -> None:
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


def test_messages_and_collectives_do_not_meet() -> None:
    ranks(3, messages)


# Calls that don't wait


def calls_that_do_not_wait() -> None:
    n = dist.get_world_size()
    xs = [torch.full((5,), float(i)) for i in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    dist.all_reduce(last := torch.ones(1))  # waits, and so comes after them
    assert all(work.is_completed() and work.is_success() for work in works)
    assert all((x == n * i).all() for i, x in enumerate(xs))
    assert (last == n).all()
    x = torch.ones(3)
    found = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] / n)
    assert torch.equal(found.wait(), torch.ones(3))

    def again(_done: Any) -> Tensor:
        dist.all_reduce(x)
        return x

    found = dist.all_reduce(x.fill_(1), async_op=True).get_future().then(again)  # a collective in what follows on one
    assert torch.equal(found.wait(), torch.full((3,), float(n * n)))
    dist.barrier(async_op=True).wait()
    others = [torch.zeros(2) for _ in range(n)]
    handle = dist.all_gather(others, torch.full((2,), float(dist.get_rank())), async_op=True)
    if dist.get_rank() == 0:
        dist.recv(x, 1)
    elif dist.get_rank() == 1:
        dist.send(x, 0)
    handle.wait()
    assert [float(other[0]) for other in others] == list(range(n))


def test_calls_that_do_not_wait_keep_their_order() -> None:
    ranks(2, calls_that_do_not_wait)


# Groups


def groups() -> None:
    rank = dist.get_rank()
    assert dist.get_backend() == "gloo"
    some = dist.new_group([0, 2], backend="ring")
    alone = dist.new_group([1], backend="ring")
    if rank == 1:
        dist.all_reduce(x := torch.ones(2), group=alone)
        assert (x == 1).all()
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


def test_a_group_of_some_ranks() -> None:
    ranks(3, groups, backend="gloo")


# Bytes


class Mute:
    """A messenger that keeps count of what each call is given."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        self.sizes.append(tensors[0].nbytes)
        return self

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        return self

    def wait(self, timeout: timedelta) -> None:
        pass


def sent(call: Callable[[Links], None], rank: int, n: int) -> int:
    messenger = Mute()
    links = Links(messenger, rank, n)
    call(links)
    assert links.sent == sum(messenger.sizes)
    return links.sent


@pytest.mark.parametrize("n", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [0, 1, 7, 24, 1_000_003])
def test_a_rank_sends_what_the_algorithm_says(n: int, size: int) -> None:
    x, parts = torch.zeros(size), [torch.zeros(size) for _ in range(n)]
    chunks = [chunk.nbytes for chunk in x.tensor_split(n)]

    def by_rank(call: Callable[[Links], None]) -> list[int]:
        return [sent(call, rank, n) for rank in range(n)]

    reduced = by_rank(lambda links: algorithms.all_reduce(links, x, Tensor.add_))
    # all but one chunk in each of two rounds
    assert reduced == [2 * x.nbytes - chunks[r] - chunks[(r + 1) % n] if n > 1 else 0 for r in range(n)]
    assert sum(reduced) == 2 * (n - 1) * x.nbytes
    if size % n == 0:
        assert set(reduced) == {2 * (n - 1) * x.nbytes // n}
    whole = by_rank(lambda links: algorithms.unchunked_all_reduce(links, x, Tensor.add_))
    assert set(whole) == {(n - 1) * x.nbytes}
    scattered = by_rank(lambda links: algorithms.reduce_scatter(links, x.tensor_split(n), Tensor.add_))
    assert scattered == [x.nbytes - chunks[rank] for rank in range(n)]
    assert set(by_rank(lambda links: algorithms.all_gather(links, parts))) == {(n - 1) * x.nbytes}
    last = [x.nbytes if rank != n - 1 else 0 for rank in range(n)]
    assert by_rank(lambda links: algorithms.broadcast(links, x, 0)) == last
    assert by_rank(lambda links: algorithms.reduce(links, x, Tensor.add_, n - 1)) == last
    assert by_rank(lambda links: algorithms.gather(links, x, parts, n - 1)) == last
    root = [(n - 1) * x.nbytes if rank == n - 1 else 0 for rank in range(n)]
    assert by_rank(lambda links: algorithms.scatter(links, x, parts, n - 1)) == root
    assert set(by_rank(lambda links: algorithms.all_to_all(links, parts, parts))) == {(n - 1) * x.nbytes}
    assert set(by_rank(algorithms.barrier)) == {(n - 1).bit_length()}


def bytes_on_the_group() -> None:
    group: Any = dist.group.WORLD
    before, x = group.links.sent, torch.ones(3_000_000)
    dist.all_reduce(x)
    assert group.links.sent - before == 2 * 2 * x.nbytes // 3
    unchunked: Any = dist.new_group(backend="ring_unchunked")
    dist.all_reduce(x, group=unchunked)
    assert unchunked.links.sent == 2 * x.nbytes
    assert (x == 9).all()


def test_a_group_sends_so_many_bytes() -> None:
    ranks(3, bytes_on_the_group)


def profiled() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        time.sleep(0.05 * dist.get_rank())  # which rank 0 waits for
        dist.barrier()
        work.wait()
    spans = {event.name: event.time_range.elapsed_us() for event in profile.events()}
    assert spans["ring:all_reduce"] > 0
    assert "ring:barrier" in spans


def test_a_profile_shows_its_collectives() -> None:
    ranks(2, profiled)


# Faults


def late() -> None:
    if dist.get_rank() == 1:
        time.sleep(3)
        os._exit(0)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
        dist.all_reduce(torch.ones(3))
    assert 0.9 < time.monotonic() - begun < 2.5
    with pytest.raises(RuntimeError):  # as with gloo's own, there is no going on
        dist.all_reduce(torch.ones(3))
    os._exit(0)


def test_a_rank_that_is_late_is_waited_for_as_long_as_was_said() -> None:
    ranks(2, late, timeout=1)


def gone(log: Path) -> None:
    if dist.get_rank() == 1:
        os._exit(0)
    time.sleep(0.3)
    try:
        dist.all_reduce(torch.ones(3))
    except RuntimeError as error:
        log.write_text(str(error))
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    with pytest.raises(RuntimeError, match=r"Connection|closed|reset|pipe"):
        future.wait()
    os._exit(0)


def test_a_rank_that_has_gone_is_an_error_of_the_others(tmp_path: Path) -> None:
    ranks(2, gone, tmp_path / "log")
    assert any(word in (tmp_path / "log").read_text() for word in roll_call.SIGNS)


def refusals() -> None:
    with pytest.raises(ValueError, match=r"expected dense tensors on a CPU for all_reduce, got torch.strided on meta"):
        dist.all_reduce(torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match="expected one of the operations SUM, AVG"):
        dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
    n = dist.get_world_size()
    large, one, wide = torch.arange(1e6), torch.ones(1), [torch.zeros(3) for _ in range(n)]
    with pytest.raises(ValueError, match=f"expected {n} x torch.float32 for all_gather_into_tensor, got {3 * n} x"):
        dist.all_gather_into_tensor(torch.zeros(3 * n), one)
    with pytest.raises(ValueError, match=r"expected 1 x torch.float32 for all_gather, got 3 x"):
        dist.all_gather(wide, one)
    with pytest.raises(ValueError, match=r"expected 1 x torch.float32 for reduce_scatter, got 3 x"):
        dist.reduce_scatter(one, wide)
    with pytest.raises(ValueError, match="for reduce_scatter_tensor, got"):
        dist.reduce_scatter_tensor(one, torch.zeros(3 * n))
    with pytest.raises(ValueError, match="the part that stays here"):
        dist.all_to_all_single(torch.zeros(3 * n), torch.zeros(n))
    with pytest.raises(ValueError, match=f"expected {n} rows in all for all_to_all_single, got {2 * n}"):
        dist.all_to_all_single(torch.zeros(n), torch.zeros(n), [2] * n, [2] * n)
    with pytest.raises(ValueError, match=r"expected another operation than BAND for torch.float32"):
        dist.all_reduce(large, dist.ReduceOp.BAND)
    with pytest.raises(ValueError, match=r"expected another operation than AVG for torch.int64"):
        dist.all_reduce(torch.arange(3), dist.ReduceOp.AVG)
    dist.all_reduce(large)  # nothing of what was refused is under way
    assert torch.equal(large, n * torch.arange(1e6))


@pytest.mark.parametrize("size", [1, 2])
def test_what_it_can_not_do_is_said(size: int) -> None:
    ranks(size, refusals)


def test_it_is_there_only_when_it_is_registered() -> None:
    assert "ring" not in dist.Backend.backend_list, "importing strategies has registered it"
    ranks(1, registered_twice)


def registered_twice() -> None:
    ring.register()
    assert dist.Backend.backend_list.count("ring") == 1
    assert dist.get_backend() == "ring"


def test_a_queue_that_is_not_used_ends_its_thread() -> None:
    queue = Queue()
    work = queue.add(Collective("test", lambda: None, []), at_once=False)
    work.wait(timedelta(seconds=5))
    thread = queue._thread
    del queue
    thread.join(5)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="Timed out waiting 10ms for test to complete"):
        Collective("test", lambda: None, []).wait(timedelta(milliseconds=10))


PAGE = Path(__file__).parents[1] / "docs" / "communication.md"


def page_script(_rank: int, _path: Path) -> None:
    script = next(
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "import" in block
    )
    exec(compile(script, str(PAGE), "exec"), {})


def test_the_script_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    for rank, run in enumerate(launch(page_script, tmp_path)):
        assert run.wait() == 0, run.output
        assert f"rank {rank}: 1, 4,000,000 bytes sent" in run.output
