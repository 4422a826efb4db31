"""The study of strategies: what each costs and gains, from real fits that are measured inside their ranks."""

from collections.abc import Mapping, Sequence
from functools import partial

from harness.studies import study
from lab.studies.hardware.cases import SINGLE, Case, Cases
from lab.studies.hardware.measure import Bench, StrategyTiming
from lab.studies.hardware.report import report


class Study(study.Study[StrategyTiming]):
    """Measures strategies; rows are named by `strategy`."""

    key, needed = "strategy", SINGLE

    def line(self, row: StrategyTiming) -> str:
        return f"{row['strategy']:16} {row['images_per_second']:10,.0f} images/s"

    def run(self, bench: Bench, cases: Sequence[Case], skipped: Mapping[str, str]) -> None:
        """Measure the missing cases, one process first; print and save the report, with why others are skipped."""

        def measure_case(case: Case) -> StrategyTiming:
            row = bench.measure(case)
            row["speedup"] = row["images_per_second"] / self.rows.get(SINGLE, row)["images_per_second"]
            return row

        calls = {case.name: partial(measure_case, case) for case in cases}
        self.measure(calls)
        self.finish(report(self.header, self.write(calls), self.missing(skipped)))
