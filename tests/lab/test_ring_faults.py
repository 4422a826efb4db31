"""The ring where it can not go on: ranks that are late or gone, what is refused; and how it comes and goes."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab.strategies import ring
from lab.strategies.ring.queue import Collective, Queue
from strategies.base import failures
from tests.ranks import in_ranks, ranks


@in_ranks(2, timeout=1)
def test_a_rank_that_is_late_is_waited_for_as_long_as_was_said() -> None:
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
    assert failures.SIGNS.search((tmp_path / "log").read_text())


@in_ranks(1, 2)
def test_what_it_can_not_do_is_said() -> None:
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


@in_ranks(1)
def test_registering_twice_is_once() -> None:
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
