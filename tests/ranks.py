"""Calls a function in the ranks of a process group, forked from this warm interpreter."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from lab.strategies import ring
from tests import waiting


def ranks(size: int, function: Callable[..., None], *args: Any, backend: str = "ring", timeout: float = 20) -> None:
    """Call `function(*args)` in each of `size` ranks; what one raises is raised here.

    Args:
        size: of the group.
        function: the same for all.
        *args: its arguments.
        backend: of the group.
        timeout: seconds, of the group.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = (size, backend, timeout, str(Path(folder) / "store"), function, args)
        context: Any = start_processes(_rank, args=call, nprocs=size, join=False, start_method="fork")
        try:
            ended = waiting.wait(lambda: context.join(0.02), lambda: [process.pid for process in context.processes])
            assert ended, "the ranks are idle"
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def in_ranks(*sizes: Any, **options: Any) -> Callable[[Callable[[], None]], Callable[[Any], None]]:
    """Run a test in the ranks of a group of each size, see `ranks`."""

    def decorate(test: Callable[[], None]) -> Callable[[Any], None]:
        def run(size: int) -> None:
            ranks(size, test, **options)

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return pytest.mark.parametrize("size", sizes)(run)

    return decorate


def _rank(
    rank: int, size: int, backend: str, timeout: float, store: str, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)  # the parent has used OpenMP
    os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
    ring.register()
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    function(*args)
    dist.destroy_process_group()
