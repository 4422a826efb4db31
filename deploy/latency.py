"""Latency of nets, measured in turn, so that other load on the machine affects all alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.extras import Missing
from deploy.agreement import disagreement
from harness.runs.quiet import notice
from strategies.base.private import has_cpp_compiler, inductor_config

WARM_UP = 5  # calls
Times = dict[str, dict[str, float]]  # by batch size
Fail = Callable[[Exception, str], None]


@dataclass
class Latency:
    """Calls each net in turn, compiled by Inductor for its batch size, weights frozen.

    Args:
        threads: with which a net computes; when not given, OMP_NUM_THREADS, else 1 for images of up to 16 x 16 and one
            a core for larger ones.
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

    @property
    def used(self) -> int:
        return self.threads or torch.get_num_threads()

    def measure(self, nets: Mapping[str, nn.Module], images: Tensor, fail: Fail | None = None) -> dict[str, Times]:
        """Measure `median` and `p95` in milliseconds, by net and batch size; nothing of a net that fails.

        Args:
            nets: in eval mode, images (b, C, H, W) -> logits (b, classes); `float32` must agree as `exact` says.
            images: float32 (N, C, H, W), repeated if they are fewer than a batch.
            fail: called with an error in compiling and the net's name; without it the error is raised.
        """
        times: dict[str, Times] = {name: {} for name in nets}
        for size in self.batch_sizes:
            batch = images[torch.arange(size) % len(images)].contiguous()
            calls = self._in_turn({name: nets[name] for name in times}, batch, fail)
            milliseconds = {name: np.percentile(seconds, (50, 95)) * 1e3 for name, seconds in calls.items()}
            for name, (median, p95) in milliseconds.items():
                times[name][str(size)] = {"median": float(median), "p95": float(p95)}
            times = {name: times[name] for name in calls}
        return {name: times.get(name, {}) for name in nets}

    def _in_turn(self, nets: Mapping[str, nn.Module], batch: Tensor, fail: Fail | None) -> dict[str, list[float]]:
        """Measure seconds of each call of the nets that can be compiled."""
        from torch.utils.benchmark import Timer

        before = torch.get_num_threads()
        torch.set_num_threads(self.used)  # Inductor writes their number into its code
        torch._dynamo.reset()  # it compiles a code but eight times, and then runs it as it is
        timers: dict[str, Timer] = {}
        try:
            with torch.no_grad():
                for name, net in nets.items():
                    notice(f"compiling {name} for batches of {len(batch)}")
                    try:
                        variables = {"net": compile_whole(net, batch, name == "float32"), "images": batch}
                    except Exception as error:  # whatever a compiler makes of a net; the others don't depend on it
                        if fail is None:
                            raise
                        fail(error, name)
                    else:
                        timers[name] = Timer("net(images)", globals=variables, num_threads=self.used)
                for timer in timers.values():
                    timer.timeit(WARM_UP)
                rounds = [[timer.timeit(1).median for timer in timers.values()] for _ in range(self.repeats)]
        finally:
            torch.set_num_threads(before)
        return dict(zip(timers, map(list, zip(*rounds, strict=True)), strict=True))


def compile_whole(net: nn.Module, batch: Tensor, exact: bool) -> Callable[[Tensor], Any]:
    """Compile a net in eval mode by Inductor for a batch (b, C, H, W), with frozen weights, which int8 needs on x86.

    RuntimeError if it can't be compiled as a whole, or does not answer as the net does (`exact` as in `disagreement`).
    """
    import warnings

    with inductor_config().patch(freezing=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor's notices to torch
        call = torch.compile(net, dynamic=False, fullgraph=True)
        try:
            logits = call(batch)
        except Exception as error:
            first = next(filter(str.strip, str(error).splitlines()), "")
            raise RuntimeError(f"Inductor can't compile it as a whole: {type(error).__name__}: {first}") from error
    if fault := disagreement(net(batch), logits, exact, share=1):  # of so few images only the margins tell
        raise RuntimeError(f"compiled it answers otherwise: {fault}")
    return call


def need_compiler() -> None:
    """Raise Missing where there is no C++ compiler."""
    if not has_cpp_compiler():
        raise Missing("", "C++ compiler", "one, as g++, with which torch.compile makes what is timed")
