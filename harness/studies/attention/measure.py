"""Measures cases: on a CPU each in a process of its own, on a GPU one after the other in this one."""

import gc
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import autograd
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from apprentice.errors import BadInput
from harness.reports.report import Facts
from harness.runs.files import atomic, write_json
from harness.studies.attention.calls import Call, call
from harness.studies.attention.cases import Case
from harness.studies.isolation import call_isolated, can_fork, children_end_with_block, silenced
from harness.studies.meters import PeakMemory

MATRICES = {"cpu": (256, 512, 1024, 2048), "cuda": (1024, 2048, 4096, 8192)}
LONG = 3  # times the seconds of a row: products of matrices that take longer are left out
TIMES, SLOW, TIMES_IF_SLOW = 5, 1.0, 3  # times taken of a call at least; seconds of one that is slow
CALLS, HEAVIEST = 25, 10  # as the tutorial profiles
FUSED = ("flash", "efficient", "cudnn")
NO_MEMORY = "can't allocate memory"
LOGGERS = ("torch._inductor", "torch.fx", "torch.utils.cpp_extension")  # they tell what the compiler misses: a GPU


@dataclass(frozen=True)
class Bench:
    """Measures cases and products of matrices."""

    device: torch.device  # that is measured
    seconds: float  # for which a row is timed at least
    threads: int  # of a process on a CPU

    @staticmethod
    def prepare(cases: Iterable[Case]) -> None:
        """Load what takes time once, not in the process of every case."""
        with silenced(*LOGGERS):
            importlib.import_module("torch.utils.benchmark")
            if any(case.compiled for case in cases):
                importlib.import_module("torch._inductor.compile_fx")

    def measure(self, case: Case, folder: Path) -> Facts:
        """The case's row; `refused` has torch's reason if it can't run here; a Chrome trace goes into the folder."""
        facts: Facts = {"name": case.name, **asdict(case), "direction": case.direction, "refused": None}
        return {**facts, **self._isolated(partial(self._row, case, folder))}

    def products(self, name: str, dtype: str) -> Facts:
        """The row of this name for products of two square matrices of the type."""
        return {"name": name, "part": "matmul", "dtype": dtype, "refused": None, **self.peak(dtype)}

    def peak(self, dtype: str) -> Facts:
        """The best of some products of two square matrices, by TFLOP/s."""
        return self._isolated(partial(self._matrices, dtype))

    def _isolated(self, measured: Callable[[], Facts]) -> Facts:
        if self.device.type == "cuda" or not can_fork():
            gc.collect()
            return measured()
        with children_end_with_block(), tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "facts.json"
            call_isolated(partial(_write_measured, measured, file), self.threads)
            return json.loads(file.read_text())

    # In a process of its own

    def _row(self, case: Case, folder: Path) -> Facts:
        try:
            with silenced(*LOGGERS), call(case, self.device) as called:
                facts: Facts = {"kernel": kernel_of(called)}  # the first call, in which a compiler has its memory, too
                memory = PeakMemory(self.device)
                called()
                facts |= {"peak_bytes": memory.bytes(), **self._timed(called, case.operations)}
                return facts | ({"operators": self._profiled(called, case, folder)} if case.part == "profile" else {})
        except BadInput as error:
            return {"refused": error.expected.partition("torch says: ")[2] or error.expected}
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not isinstance(error, torch.OutOfMemoryError) and NO_MEMORY not in str(error):
                raise
            return {"refused": " ".join(str(error).splitlines()[0].split())}
        finally:
            if self.device.type == "cuda":
                torch.compiler.reset()
                torch.cuda.empty_cache()

    def _timed(self, called: Call, operations: float) -> Facts:
        # Loaded here, as it looks for a CUDA compiler, and tells if there is none
        from torch.utils.benchmark import Measurement, Timer

        timer = Timer("call()", globals={"call": called}, num_threads=torch.get_num_threads())
        # Not blocked_autorange: for each time that it takes it may call a hundred times, however long a call is.
        first = timer.timeit(1)
        times = TIMES_IF_SLOW if first.median > SLOW else TIMES
        number = max(round(self.seconds / times / first.median), 1)
        (found,) = Measurement.merge([timer.timeit(number) for _ in range(times)])
        return {
            "microseconds": 1e6 * found.median,
            "iqr_microseconds": 1e6 * found.iqr,
            "times": len(found.raw_times),
            "tflops_per_second": operations / found.median / 1e12,
            "threads": torch.get_num_threads(),
        }

    def _matrices(self, dtype: str) -> Facts:
        found: list[Facts] = []
        for n in MATRICES[self.device.type]:
            a, b = torch.randn(2, n, n).to(self.device, getattr(torch, dtype)).unbind()
            found.append({"matrix": n, **self._timed(partial(torch.mm, a, b), 2 * n**3)})
            if 8 * found[-1]["microseconds"] > 1e6 * LONG * self.seconds:  # what the next would take
                break
        return max(found, key=lambda facts: facts["tflops_per_second"])

    def _profiled(self, called: Call, case: Case, folder: Path) -> list[Facts]:
        """The operators that take longest by themselves, over some calls, whose Chrome trace is written."""
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities, acc_events=True) as profiler:
            for _ in range(CALLS):
                called()
            if on_gpu:
                torch.cuda.synchronize()
        with atomic(folder / trace(case)) as path:
            profiler.export_chrome_trace(str(path))
        averages = profiler.key_averages()
        times = [(e.self_device_time_total if on_gpu else e.self_cpu_time_total, e.count, e.key) for e in averages
                 if not on_gpu or e.device_type == DeviceType.CUDA]  # fmt: skip
        whole = sum(time for time, _, _ in times)
        return [
            {"operator": key, "microseconds": time / CALLS, "calls": count / CALLS, "share": time / whole}
            for time, count, key in sorted(times, reverse=True)[:HEAVIEST]
        ]


def trace(case: Case) -> str:
    """File of a case's Chrome trace."""
    return f"trace_{'compiled' if case.compiled else 'eager'}.json"


def kernel_of(called: Call) -> str:
    """Which kernel a call takes, as torch's profiler tells."""
    with autograd.profiler.profile(use_kineto=False) as profiler:
        called()
    return fused([event.key for event in profiler.key_averages()])


def fused(operators: Sequence[str]) -> str:
    """The fused kernel among these operators, or `math`, which is made of others."""
    return next((name for name in FUSED for key in operators if f"{name}_attention" in key), "math")


def _write_measured(measured: Callable[[], Facts], file: Path) -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no processes of the compiler's own
    write_json(file, measured())
