"""How long nets take for a batch, measured in turn, so that what else the machine does strikes all alike."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.extras import Missing

WARM_UP = 5  # calls


@dataclass
class Latency:
    """How latency is measured: calls of each net in turn, compiled by Inductor for its batch size, weights frozen.

    Args:
        threads: with which a net computes; as many as torch has when not given.
        batch_sizes: images in a batch.
        repeats: calls of each net that are timed.
    """

    threads: int | None = None
    batch_sizes: list[int] = field(default_factory=lambda: [1, 128])
    repeats: int = 100

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise BadInput("threads", self.threads, "a number of threads, at least 1")
        sizes = self.batch_sizes
        if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 1:
            raise BadInput("batch_sizes", sizes, "numbers of images, at least 1, none of them twice")
        if self.repeats < 1:
            raise BadInput("repeats", self.repeats, "a number of calls, at least 1")

    def measure(self, nets: Mapping[str, nn.Module], images: Tensor) -> dict[str, dict[str, dict[str, float]]]:
        """By net and batch size, `median` and `p95` in milliseconds.

        Args:
            nets: in eval mode, images (b, C, H, W) -> logits (b, classes).
            images: float32 (N, C, H, W), repeated if they are fewer than a batch.
        """
        found: dict[str, dict[str, dict[str, float]]] = {name: {} for name in nets}
        for size in self.batch_sizes:
            batch = images[torch.arange(size) % len(images)].contiguous()
            for name, seconds in self._in_turn(nets, batch).items():
                p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
                found[name][str(size)] = {"median": statistics.median(seconds) * 1e3, "p95": p95 * 1e3}
        return found

    def _in_turn(self, nets: Mapping[str, nn.Module], batch: Tensor) -> dict[str, list[float]]:
        before = torch.get_num_threads()
        threads = self.threads or before
        torch.set_num_threads(threads)  # Inductor writes their number into its code
        try:
            with torch.no_grad():
                return self._seconds(nets, batch, threads)
        finally:
            torch.set_num_threads(before)

    def _seconds(self, nets: Mapping[str, nn.Module], batch: Tensor, threads: int) -> dict[str, list[float]]:
        from torch.utils.benchmark import Timer

        calls = {name: compiled(net, batch) for name, net in nets.items()}
        timers = {
            name: Timer("net(images)", globals={"net": call, "images": batch}, num_threads=threads)
            for name, call in calls.items()
        }
        for timer in timers.values():
            timer.timeit(WARM_UP)
        seconds: dict[str, list[float]] = {name: [] for name in nets}
        for _ in range(self.repeats):
            for name, timer in timers.items():
                seconds[name].append(timer.timeit(1).median)
        return seconds


def compiled(net: nn.Module, batch: Tensor) -> Callable[[Tensor], Any]:
    """The net as Inductor compiles it for such a batch, its weights frozen: what makes int8 fast on x86.

    Raises:
        Missing: there is no C++ compiler.
    """
    import warnings

    import torch._inductor.config as inductor

    with inductor.patch(freezing=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's notices to torch
        call = torch.compile(net, dynamic=False)
        call(batch)
    return call


def need_compiler() -> None:
    """Raise Missing where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler("cpu")
    except (InvalidCxxCompiler, RuntimeError):
        raise Missing("", "C++ compiler", "one, as g++, with which torch.compile makes what is timed") from None
