"""Meters of one process: time, peak memory, bytes of the training state, bytes sent."""

import ctypes
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

LINUX = sys.platform == "linux"
OVER_TCP = ("gloo", "ring")  # backends whose messages are all sent so
TCP_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux' struct tcp_info, since 4.1


class Stamps:
    """Moments, and the seconds between them; on a GPU its own clock, so that nothing waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def mark(self) -> None:
        """Note this moment."""
        if self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each moment to the next."""
        if self._gpu:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) / 1e3 for first, second in pairwise(self._moments)]
        return [second - first for first, second in pairwise(self._moments)]


class PeakMemory:
    """The growth of memory from here on to its peak.

    On a GPU that of torch's allocator. On Linux that of the process's resident memory without pages of files: a fork
    has not read the libraries' code yet, which is no cost of training.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        elif LINUX:
            libc = ctypes.CDLL(None)
            if hasattr(libc, "malloc_trim"):
                libc.malloc_trim(0)  # freed pages that glibc keeps would be filled without any growth
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
            self._start = _status()["RssAnon"]

    def bytes(self) -> int | None:
        """The peak so far; None where it is unknown."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        if not LINUX:
            return None
        now = _status()
        return max(now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._start, 0)


def _status() -> dict[str, int]:
    found = re.findall(r"(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {name: 2**10 * int(size) for name, size in found}


def state_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Bytes of parameters, gradients and optimizer state that this rank holds; of a sharded tensor its own shard."""
    parameters = list(module.parameters())
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    for optimizer in optimizers:
        tensors += [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    local: list[Any] = [x.to_local() if hasattr(x, "to_local") else x for x in tensors]
    return sum(x.numel() * x.element_size() for x in local)


def sent_bytes() -> int | None:
    """Acknowledged payload in bytes of this process's TCP connections, as the kernel counts it.

    0 outside of a process group; None where ranks talk through something else (NCCL), or off Linux.
    """
    if not dist.is_available() or not dist.is_initialized():
        return 0
    if not LINUX or dist.get_backend() not in OVER_TCP:
        return None
    return sum(_acked(int(name)) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not paths


def _acked(descriptor: int) -> int:
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):  # noqa: PTH115 - it is no path
            return 0
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:  # closed meanwhile
        return 0
    with connection:
        if connection.family not in {socket.AF_INET, socket.AF_INET6} or connection.type != socket.SOCK_STREAM:
            return 0
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 300)
    return struct.unpack_from("Q", info, TCP_BYTES_ACKED)[0] if len(info) >= TCP_BYTES_ACKED + 8 else 0
