"""Calls a function in the ranks of a process group, forked from this warm interpreter."""

import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from strategies import ring

LIMIT = 60  # seconds


def ranks(size: int, function: Callable[..., None], *args: Any, backend: str = "ring", timeout: float = 20) -> None:
    """Call `function(*args)` in each of `size` ranks; what one raises is raised here.

    Args:
        size: of the group.
        function: the same for all.
        *args: its arguments.
        backend: of the group.
        timeout: seconds, of the group; the ranks have a minute.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = (size, backend, timeout, str(Path(folder) / "store"), function, args)
        context: Any = start_processes(_rank, args=call, nprocs=size, join=False, start_method="fork")
        deadline = time.monotonic() + LIMIT
        try:
            while not context.join(max(deadline - time.monotonic(), 0.1)):
                assert time.monotonic() < deadline, f"ranks still run after {LIMIT} s"
        finally:
            for process in context.processes:
                process.kill()
                process.join()


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
