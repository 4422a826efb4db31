"""Measures cases on noise: on a CPU each in a process of its own, on a GPU one after the other in this one."""

import gc
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, autograd, nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from apprentice.errors import BadInput
from harness.runs.files import atomic
from harness.runs.quiet import silence
from lab.studies.attention.cases import Case
from lab.studies.isolation import call_isolated, can_fork
from lab.studies.meters import PeakMemory
from lit_modules.nets.attention.attend import attend
from lit_modules.nets.attention.form import Form
from lit_modules.nets.attention.kernels import use_kernel
from lit_modules.nets.attention.softmax import SelfAttention
from lit_modules.nets.transformer import Block

Call = Callable[[], object]
MATRICES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
LONG = 3  # times the seconds of a row: products of matrices that take longer are left out
TIMES, SLOW, TIMES_IF_SLOW = 5, 1.0, 3  # times taken of a call at least; seconds of one that is slow
CALLS, HEAVIEST = 25, 10  # as the tutorial profiles
FUSED = ("flash", "efficient", "cudnn")
LOGGERS = ("torch._inductor", "torch.fx", "torch.utils.cpp_extension")  # they warn that there is no GPU


class Operator(TypedDict):
    """An operator of a profiled call; figures are per call."""

    operator: str
    microseconds: float
    calls: float
    share: float


class CallTiming(TypedDict, total=False):
    """A measured case, or a product of matrices with a name, a part and a dtype, or why torch refuses it.

    A case has all fields of `Case`; those that the report reads are here.
    """

    name: str
    part: str
    dtype: str
    batch: int
    length: int
    heads: int
    head_dim: int
    block: bool
    backend: str
    backward: bool
    tutorial_us: float | None
    direction: str
    refused: str | None
    kernel: str
    peak_bytes: int | None
    microseconds: float
    iqr_microseconds: float
    times: int
    tflops_per_second: float
    share_of_peak: float | None
    threads: int
    matrix: int  # rows of the square matrices of a product
    operators: list[Operator]  # of a profiled call


T = TypeVar("T")


@dataclass(frozen=True)
class Bench:
    """Measures cases and products of matrices."""

    device: torch.device  # that is measured
    seconds: float  # for which a row is timed at least
    threads: int  # of a process on a CPU

    @staticmethod
    def prepare(cases: Iterable[Case]) -> None:
        """Import slow modules once, not in the process of every case."""
        with silence(*LOGGERS):
            importlib.import_module("torch.utils.benchmark")
            if any(case.compiled for case in cases):
                importlib.import_module("torch._inductor.compile_fx")

    def measure(self, case: Case, folder: Path) -> CallTiming:
        """Measure a case and return its row; write the Chrome trace of a profiled one into the folder."""
        row: Any = {"name": case.name, **asdict(case), "direction": case.direction, "refused": None}
        return {**row, **self._run_isolated(partial(self._measure_call, case, folder))}

    def products(self, name: str, dtype: str) -> CallTiming:
        """Return a row for the product of two square matrices of the type that reaches most TFLOP/s."""
        fastest = self._run_isolated(partial(self._fastest_product, dtype))
        return {"name": name, "part": "matmul", "dtype": dtype, "refused": None, **fastest}

    def _run_isolated(self, function: Callable[[], T]) -> T:
        if self.device.type == "cuda" or not can_fork():
            gc.collect()
            return function()

        def call() -> T:
            os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes of the compiler's own
            return function()

        return call_isolated(call, self.threads)

    # In a process of its own

    def _measure_call(self, case: Case, folder: Path) -> CallTiming:
        try:
            with silence(*LOGGERS), open_call(case, self.device) as call:
                with autograd.profiler.profile(use_kineto=False) as profiler:
                    call()  # the first call, in which a compiler takes memory, too
                ran = find_kernel([event.key for event in profiler.key_averages()])
                kernel = case.backend if case.backend == "flex" else ran  # compiled, it has no name of its own
                memory = PeakMemory(self.device)
                call()
                peak = memory.bytes()
                figures: CallTiming = {"kernel": kernel, "peak_bytes": peak, **self._time(call, case.operations)}
                if case.part == "profile":
                    figures["operators"] = self._profile(call, case, folder)
                return figures
        except BadInput as error:
            return {"refused": error.expected.partition("torch says: ")[2] or error.expected}
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
                raise
            return {"refused": " ".join(str(error).splitlines()[0].split())}
        finally:
            if self.device.type == "cuda":
                torch.compiler.reset()
                torch.cuda.empty_cache()

    def _time(self, call: Call, operations: float) -> CallTiming:
        # Imported here, as it looks for a CUDA compiler, and prints if there is none
        from torch.utils.benchmark import Measurement, Timer

        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        # Not blocked_autorange, which may call a hundred times for one time, however long a call is
        first = timer.timeit(1)
        times = TIMES_IF_SLOW if first.median > SLOW else TIMES
        number = max(round(self.seconds / times / first.median), 1)
        (merged,) = Measurement.merge([timer.timeit(number) for _ in range(times)])
        return {
            "microseconds": 1e6 * merged.median,
            "iqr_microseconds": 1e6 * merged.iqr,
            "times": len(merged.raw_times),
            "tflops_per_second": operations / merged.median / 1e12,
            "threads": torch.get_num_threads(),
        }

    def _fastest_product(self, dtype: str) -> CallTiming:
        products: list[CallTiming] = []
        for n in MATRICES[self.device.type]:
            a, b = torch.randn(2, n, n).to(self.device, getattr(torch, dtype)).unbind()
            products.append({"matrix": n, **self._time(partial(torch.mm, a, b), 2 * n**3)})
            if 8 * products[-1]["microseconds"] > 1e6 * LONG * self.seconds:  # what the next would take
                break
        return max(products, key=lambda product: product["tflops_per_second"])

    def _profile(self, call: Call, case: Case, folder: Path) -> list[Operator]:
        """Profile some calls, write their Chrome trace, and return the operators that take longest by themselves."""
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(CALLS):
                call()
            if on_gpu:
                torch.cuda.synchronize()
        with atomic(folder / f"trace_{'compiled' if case.compiled else 'eager'}.json") as path:
            profiler.export_chrome_trace(str(path))
        times = [
            (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count, event.key)
            for event in profiler.key_averages()
            if not on_gpu or event.device_type == DeviceType.CUDA
        ]
        total = sum(time for time, _, _ in times)
        return [
            {"operator": key, "microseconds": time / CALLS, "calls": count / CALLS, "share": time / total}
            for time, count, key in sorted(times, reverse=True)[:HEAVIEST]
        ]


def find_kernel(operators: Sequence[str]) -> str:
    """Return the fused kernel among these operators, or `math`, which consists of others."""
    return next((name for name in FUSED for key in operators if f"{name}_attention" in key), "math")


@contextmanager
def open_call(case: Case, device: torch.device) -> Iterator[Call]:
    """Yield a case's call on noise, for use inside the block."""

    def noise(*shape: int) -> Tensor:  # drawn on the CPU in float32, the same for all types and devices
        return torch.randn(*shape).to(device, getattr(torch, case.dtype))

    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(case.backward):
        torch.default_generator.manual_seed(0)
        if case.block:
            yield _block_call(case, noise)
            return
        # Queries, keys, values, and the gradient of the output: (B, heads, T, D / heads)
        query, key, value, grad = (noise(case.batch, case.heads, case.length, case.head_dim) for _ in range(4))
        inputs = [x.requires_grad_(case.backward) for x in (query, key, value)]
        forward: Callable[[], Tensor] = partial(
            F.scaled_dot_product_attention, query, key, value, is_causal=case.causal
        )
        if case.backend == "flex":
            forward = partial(attend, query, key, value, Form(backend="flex"), None, case.causal)
        chosen = nullcontext() if case.backend == "flex" else use_kernel(case.backend, *inputs, None, 0.0, case.causal)
        with chosen:
            yield (lambda: torch.autograd.grad(forward(), inputs, grad)) if case.backward else forward


class MultiheadAttention(nn.MultiheadAttention):
    """torch's module as self-attention: one input (B, T, D)."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """(B, T, D) -> (B, T, D)."""
        return super().forward(x, x, x, need_weights=False)[0]


def block(case: Case) -> nn.Module:
    """Build the case's block of attention: ours, or torch's of the same function."""
    width, heads, bias = case.width, case.heads, case.bias
    backend: Any = case.backend
    if case.layer == "MultiheadAttention":
        return MultiheadAttention(width, heads, case.dropout, bias, batch_first=True)
    if case.layer == "TransformerEncoderLayer":
        options = {"batch_first": True, "norm_first": True, "bias": bias}
        return nn.TransformerEncoderLayer(width, heads, 4 * width, case.dropout, "gelu", **options)
    attention = SelfAttention(width, heads, case.causal, case.dropout, bias, backend)
    return Block(attention, dropout=case.dropout, bias=bias) if case.layer == "Block" else attention


def _block_call(case: Case, noise: Callable[..., Tensor]) -> Call:
    module = block(case)
    x = noise(sum(case.tokens), case.width)  # of all texts, (B · T, D)
    module = module.to(x).train(case.backward)
    if case.lengths is None:
        x = x.unflatten(0, (case.batch, case.length))
    else:
        offsets = torch.tensor([0, *case.lengths], device=x.device).cumsum(0)
        shortest, longest = min(case.lengths), max(case.lengths)
        x = torch.nested.nested_tensor_from_jagged(x, offsets, min_seqlen=shortest, max_seqlen=longest).detach()
    x.requires_grad_(case.backward)
    forward = torch.compile(module, dynamic=False) if case.compiled else module
    if not case.backward:
        return partial(forward, x)
    inputs, grad = [x, *module.parameters()], noise(*_values(x).shape)
    return lambda: torch.autograd.grad(_values(forward(x)), inputs, grad)


def _values(x: Tensor) -> Tensor:
    return x.values() if x.is_nested else x
