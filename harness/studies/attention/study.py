"""A run of the study: the rows that are missing are measured, and all are told."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from harness.reports.tables import short
from harness.studies.attention.bench import Bench
from harness.studies.attention.report import save, text
from harness.studies.attention.rows import Row
from harness.studies.kept import ResumableResults

Facts = dict[str, Any]
PEAK = (
    "by type the best TFLOP/s among all rows of the part matmul: products of two square matrices of several sizes, "
    "measured before each part and at the end"
)


class Study:
    """A run that is new or goes on.

    Args:
        kept: what there is of it, by `name`.
        longest: seconds of a call; a block whose products of matrices alone take longer is left out.
    """

    def __init__(self, kept: ResumableResults, longest: float) -> None:
        self.kept, self.longest = kept, longest
        self.left_out: dict[str, str] = {}

    def run(self, bench: Bench, rows: Sequence[Row]) -> None:
        """Measure the rows that are missing, print and save what they say.

        Args:
            bench: measures.
            rows: what there is to measure.

        Raises:
            SystemExit: a row failed; the others are there. One that torch refuses has not failed.
        """
        bench.prepare(row for row in rows if row.name not in self.kept.rows)
        measure = self._ways(bench, rows)

        def add(name: str) -> None:
            if (facts := measure[name]()) is None:
                return
            self.kept.rows[name] = facts
            self._write(measure)
            print(f"{name:72} {_said(facts):>20}", flush=True)

        self.kept.measure(measure, add, needed="")
        results, missing = self._write(measure), self.kept.missing(self.left_out)
        save(self.kept.out, results, missing)
        print(f"{text(results, missing)}\n\n{self.kept.out}/results.md, .json, *.png, trace_*.json")
        if self.kept.failed:
            raise SystemExit(1)

    def _ways(self, bench: Bench, rows: Sequence[Row]) -> dict[str, Callable[[], Facts | None]]:
        """How each row is measured, by name, in order: products of matrices stand before each part and at the end."""
        ways: dict[str, Callable[[], Facts | None]] = {}

        def add_products(rows: Iterable[Row], when: str) -> None:
            for dtype in dict.fromkeys(row.dtype for row in rows):
                name = _product(dtype, when)
                ways[name] = partial(self._multiplied, bench, {"name": name, "part": "matmul", "dtype": dtype})

        for part in dict.fromkeys(row.part for row in rows):
            mine = [row for row in rows if row.part == part]
            add_products(mine, f"before {part}")
            ways |= {row.name: partial(self._measured, bench, row) for row in mine}
        add_products(rows, "at the end")
        return ways

    @staticmethod
    def _multiplied(bench: Bench, row: Facts) -> Facts:
        return {**row, "refused": None, **bench.peak(row["dtype"])}

    def _measured(self, bench: Bench, row: Row) -> Facts | None:
        """None of a row that takes too long."""
        product = self.kept.rows.get(_product(row.dtype, "before blocks"))
        seconds = 0 if product is None else row.projections / (1e12 * product["tflops_per_second"])
        if row.part != "blocks" or seconds <= self.longest:
            return bench.measure(row, self.kept.out)
        why = f"at its best the machine takes longer for the projections than --longest {self.longest} s"
        self.left_out[row.name] = f"left out: {why}"
        return None

    def _write(self, names: Iterable[str]) -> Facts:
        """Write what there is, each row with its share of the peak as known so far."""
        rows = self.kept.rows.values()
        peaks: dict[str, float] = {}
        for row in rows:
            if row["part"] == "matmul":
                peaks[row["dtype"]] = max(peaks.get(row["dtype"], 0.0), row["tflops_per_second"])
        for row in rows:
            reached, peak = row.get("tflops_per_second"), peaks.get(row["dtype"])
            row["share_of_peak"] = None if reached is None or peak is None else reached / peak
        self.kept.header["peak"] = {"is": PEAK, "tflops_per_second": peaks}
        return self.kept.write(names)


def _product(dtype: str, when: str) -> str:
    return f"matmul: {dtype}, {when}"


def _said(facts: Facts) -> str:
    if facts["refused"]:
        return "refused"
    if facts["part"] == "matmul":
        return f"{short(facts['tflops_per_second'])} TFLOP/s"
    return f"{short(facts['microseconds'])} µs"
