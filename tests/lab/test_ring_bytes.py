"""What a rank sends in each collective of the ring, and what a profile shows of it."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lab.strategies.ring import algorithms
from lab.strategies.ring.algorithms import Links
from tests.ranks import in_ranks


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


@in_ranks(3)
def test_a_group_sends_so_many_bytes() -> None:
    group: Any = dist.group.WORLD
    before, x = group.links.sent, torch.ones(3_000_000)
    dist.all_reduce(x)
    assert group.links.sent - before == 2 * 2 * x.nbytes // 3
    unchunked: Any = dist.new_group(backend="ring_unchunked")
    dist.all_reduce(x, group=unchunked)
    assert unchunked.links.sent == 2 * x.nbytes
    assert (x == 9).all()


@in_ranks(2)
def test_a_profile_shows_its_collectives() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        time.sleep(0.05 * dist.get_rank())  # which rank 0 waits for
        dist.barrier()
        work.wait()
    spans = {event.name: event.time_range.elapsed_us() for event in profile.events()}
    assert spans["ring:all_reduce"] > 0
    assert "ring:barrier" in spans
