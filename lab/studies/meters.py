"""Meters of one process: time, memory, bytes of the training state, bytes sent, communication that is hidden."""

import ctypes
import math
import os
import re
import socket
import stat
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
from torch.profiler import ProfilerActivity

Spans = list[tuple[float, float]]
LINUX = sys.platform == "linux"
OVER_TCP = ("gloo", "ring")  # backends whose messages are all sent so
TCP_BYTES_ACKED = 120  # offset of tcpi_bytes_acked in Linux' struct tcp_info, since 4.1


class Stamps:
    """Marks moments and returns the seconds between them; reads a GPU's clock, so that marking waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._moments: list[Any] = []

    def mark(self) -> None:
        self._moments.append(torch.cuda.Event(enable_timing=True) if self._gpu else time.perf_counter())
        if self._gpu:
            self._moments[-1].record()

    def seconds(self) -> list[float]:
        """Return the seconds from each moment to the next."""
        if self._gpu:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) / 1e3 for first, second in pairwise(self._moments)]
        return [second - first for first, second in pairwise(self._moments)]


class PeakMemory:
    """Measures how much memory grows from here on to its peak.

    Reads torch's allocator on a GPU. Reads the process's resident memory on Linux, without pages of files: a fork has
    not read the libraries' code yet, and that is no cost of training.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        elif LINUX:
            ctypes.CDLL(None).malloc_trim(0)  # freed pages that glibc keeps would be filled without any growth
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
            self._start = _read_status()["RssAnon"]

    def bytes(self) -> int | None:
        """Return the peak so far; None where it is unknown."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        if not LINUX:
            return None
        now = _read_status()
        return max(now["VmHWM"] - now["RssFile"] - now["RssShmem"] - self._start, 0)


def _read_status() -> dict[str, int]:
    lines = re.findall(r"(VmHWM|RssAnon|RssFile|RssShmem):\s+(\d+) kB", Path("/proc/self/status").read_text())
    return {name: 2**10 * int(size) for name, size in lines}


def state_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Count bytes of parameters, gradients and optimizer state on this rank; a sharded tensor counts with its shard."""
    tensors: list[Any] = [x for p in module.parameters() for x in (p, p.grad)]
    for optimizer in optimizers:
        tensors += [x for state in optimizer.state.values() for x in state.values()]
    local = [x.to_local() if hasattr(x, "to_local") else x for x in tensors if isinstance(x, Tensor)]
    return sum(x.nbytes for x in local)


def sent_bytes() -> int | None:
    """Return the acknowledged payload of this process's TCP connections in bytes, as the kernel counts it.

    Returns 0 outside of a process group; None with a backend other than TCP, such as NCCL, or off Linux.
    """
    if not dist.is_initialized():
        return 0
    if not LINUX or dist.get_backend() not in OVER_TCP:
        return None
    return sum(_acknowledged_bytes(int(name)) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers, not paths


def _acknowledged_bytes(descriptor: int) -> int:
    with suppress(OSError):  # the descriptor was closed meanwhile, or is no TCP socket
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 300)
                return struct.unpack_from("Q", info, TCP_BYTES_ACKED)[0]
    return 0


class Overlap:
    """Profiles this rank until `share` is called.

    A collective lasts from its call to its last byte, including the wait for a slower rank. The hidden share is the
    time in which a collective runs while this rank computes, over the time in which a collective runs: Holistic Trace
    Analysis' communication computation overlap. On a CPU this rank computes while an operator of torch runs, on a GPU
    while a kernel other than NCCL's runs. The share leaves out that both may slow each other down.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._gpu else [])]
        self._profile = torch.profiler.profile(activities=activities, acc_events=True)
        self._profile.start()

    def share(self) -> float | None:
        """Return the hidden share; None without communication."""
        if self._gpu:
            torch.cuda.synchronize()
        self._profile.stop()
        events: Any = self._profile.events()
        backends: tuple[str, ...] = ("gloo:", "ring:")
        operators = "aten::"
        if self._gpu:
            events = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
            events = [event for event in events if not event.name.startswith(("Mem", "nccl:", "##"))]
            backends, operators = ("nccl",), ""
        communication: Spans = []
        computation: Spans = []
        for event in events:
            span = event.time_range.start, event.time_range.end
            if event.name.startswith(backends):
                communication.append(span)
            elif event.name.startswith(operators):
                computation.append(span)
        return hidden_share(communication, computation)


def hidden_share(communication: Spans, computation: Spans) -> float | None:
    """Divide the time of both at once by the time of communication; spans of one kind may overlap."""
    total = _seconds_covered(communication)
    if not total:
        return None
    # |A and B| = |A| + |B| - |A or B|, but for rounding
    both = total + _seconds_covered(computation) - _seconds_covered([*communication, *computation])
    return min(max(both / total, 0.0), 1.0)


def _seconds_covered(spans: Spans) -> float:
    """Return the time within at least one of the spans."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total
