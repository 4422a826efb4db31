"""A run of the study: the rows that are missing are measured, and all are told."""

from collections.abc import Sequence
from typing import Any

from apprentice.measuring.attention.bench import Bench
from apprentice.measuring.attention.report import save, text
from apprentice.measuring.attention.rows import Row, named
from apprentice.measuring.kept import Kept
from apprentice.tables import short

Facts = dict[str, Any]


class Study:
    """A run that is new or goes on.

    Args:
        kept: what there is of it, by `name`.
        longest: seconds of a call; a block whose products of matrices alone take longer is left out.
    """

    def __init__(self, kept: Kept, longest: float) -> None:
        self.kept, self.longest = kept, longest

    def run(self, bench: Bench, rows: Sequence[Row]) -> None:
        """Measure the rows that are missing, print and save what they say.

        Args:
            bench: measures.
            rows: what there is to measure.

        Raises:
            SystemExit: a row failed; the others are there. One that torch refuses has not failed.
        """
        dtypes = {_peak(row.dtype): row.dtype for row in rows}
        by_name = named(rows)
        names = [*dtypes, *by_name]

        def add_peak(name: str) -> None:
            self._keep_peak(name, dtypes[name], bench)
            self.kept.write(names)

        def add(name: str) -> None:
            self._keep(by_name[name], bench)
            self.kept.write(names)

        bench.prepare(row for row in rows if row.name not in self.kept.rows)
        self.kept.measure(dtypes, add_peak, needed="")
        left_out = {row.name: why for row in rows if (why := self._too_long(row))}
        self.kept.measure([name for name in by_name if name not in left_out], add, needed="")
        results, missing = self.kept.write(names), self.kept.missing(left_out)
        save(self.kept.out, results, missing)
        print(f"{text(results, missing)}\n\n{self.kept.out}/results.md, .json, *.png, trace_*.json")
        if self.kept.failed:
            raise SystemExit(1)

    def _too_long(self, row: Row) -> str | None:
        """Why it is left out."""
        peak = self.kept.rows.get(_peak(row.dtype))
        if peak is None or row.part != "blocks":
            return None
        if row.projections / (1e12 * peak["tflops_per_second"]) <= self.longest:
            return None
        return f"left out: at its best the machine takes longer for the projections than --longest {self.longest} s"

    def _keep_peak(self, name: str, dtype: str, bench: Bench) -> None:
        facts = {"name": name, "part": "matmul", "dtype": dtype, **bench.peak(dtype)}
        self.kept.rows[name] = facts
        print(f"{name:72} {short(facts['tflops_per_second']):>10} TFLOP/s", flush=True)

    def _keep(self, row: Row, bench: Bench) -> None:
        facts = bench.measure(row, self.kept.out)
        peak, reached = self.kept.rows.get(_peak(row.dtype)), facts.get("tflops_per_second")
        share = reached / peak["tflops_per_second"] if peak is not None and reached is not None else None
        self.kept.rows[row.name] = {**facts, "share_of_peak": share}
        said = "refused" if facts["refused"] else f"{short(facts['microseconds'])} µs"
        print(f"{row.name:72} {said:>13}", flush=True)


def _peak(dtype: str) -> str:
    return f"matmul: {dtype}"
