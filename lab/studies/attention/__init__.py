"""The study of attention: torch's kernels by themselves, and in a block, on this machine."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from harness.reports.tables import short
from harness.runs.session import Session
from harness.studies import study
from lab.studies.attention.cases import Case, Options, all_cases
from lab.studies.attention.measure import Bench, CallTiming
from lab.studies.attention.report import report

__all__ = ["Bench", "Case", "Options", "Study", "all_cases"]
PRODUCTS = "matmul: {dtype}, {when}"
PEAK = (
    "by type the best TFLOP/s among all rows of the part matmul: products of two square matrices of several sizes, "
    "measured before each part and at the end"
)


class Study(study.Study[CallTiming]):
    """Measures calls, and products of matrices before each part and at the end; rows are named by `name`.

    Leaves out a block whose products of matrices alone take longer than `longest` seconds.
    """

    files = "report.html, results.md, .json, *.png, trace_*.json"

    def __init__(self, run: Session, longest: float, **how: int | str) -> None:
        super().__init__(run, **how)
        self.longest = longest
        self.left_out: dict[str, str] = {}

    def line(self, row: CallTiming) -> str:
        if row["refused"]:
            result = "refused"
        elif row["part"] == "matmul":
            result = f"{short(row['tflops_per_second'])} TFLOP/s"
        else:
            result = f"{short(row['microseconds'])} µs"
        return f"{row['name']:72} {result:>20}"

    def run(self, bench: Bench, cases: Sequence[Case]) -> None:
        bench.prepare(case for case in cases if case.name not in self.rows)
        calls: dict[str, Callable[[], CallTiming | None]] = {}

        def add_products(part_cases: Sequence[Case], when: str) -> None:
            for dtype in dict.fromkeys(case.dtype for case in part_cases):
                name = PRODUCTS.format(dtype=dtype, when=when)
                calls[name] = partial(bench.products, name, dtype)

        for part in dict.fromkeys(case.part for case in cases):
            part_cases = [case for case in cases if case.part == part]
            add_products(part_cases, f"before {part}")
            calls |= {case.name: partial(self._measure_case, bench, case) for case in part_cases}
        add_products(cases, "at the end")
        self.measure(calls)
        self.finish(report(self.header, self.write(calls), self.missing(self.left_out)))

    def _measure_case(self, bench: Bench, case: Case) -> CallTiming | None:
        """Return the case's row; None where it takes too long."""
        product = self.rows.get(PRODUCTS.format(dtype=case.dtype, when=f"before {case.part}"))
        limit = 1e12 * product["tflops_per_second"] * self.longest if product else math.inf
        if case.part in {"blocks", "layers"} and case.projections > limit:
            why = f"at its best the machine takes longer for the projections than `longest`, {self.longest} s"
            self.left_out[case.name] = f"left out: {why}"
            return None
        return bench.measure(case, self.out)

    def write(self, order: Iterable[str]) -> list[CallTiming]:
        """Write results.json with the peaks, and in each row its share of the peak so far."""
        peaks: dict[str, float] = {}
        for row in self.rows.values():
            if row["part"] == "matmul":
                peaks[row["dtype"]] = max(peaks.get(row["dtype"], 0.0), row["tflops_per_second"])
        for row in self.rows.values():
            has_share = row["dtype"] in peaks and row["refused"] is None
            row["share_of_peak"] = row["tflops_per_second"] / peaks[row["dtype"]] if has_share else None
        self.header["peak"] = {"is": PEAK, "tflops_per_second": peaks}
        return super().write(order)
