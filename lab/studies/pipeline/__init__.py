"""The study of pipeline parallelism: one net on one device, split, and pipelined in every way."""

import json
from collections.abc import Mapping
from functools import partial

from harness.runs.files import read_text, write_json
from harness.runs.records import reading
from harness.runs.session import Session
from harness.studies import study
from lab.studies.pipeline.cases import ONE, Case, Cases, Cut, Options
from lab.studies.pipeline.measure import Bench, Noise, StepTiming, Task, Timeline
from lab.studies.pipeline.report import mean_seconds, report


class Study(study.Study[StepTiming]):
    """Measures ways to compute a step; rows are named by `name`, timelines of pipelines are in timelines.json."""

    needed = ONE
    files = "report.html, results.md, .png, .json, timeline.png, timelines.json"

    def __init__(self, run: Session, **how: int | str) -> None:
        super().__init__(run, **how)
        self._file = self.out / "timelines.json"
        self.timelines: dict[str, Timeline] = {}
        if self._file.exists():
            with reading(self._file, "out", "timelines of pipelines, or no such file"):
                self.timelines = dict(json.loads(read_text(self._file)))

    def line(self, row: StepTiming) -> str:
        return f"{row['name']:52} {mean_seconds(row):8.3f} s a step"

    def run(self, bench: Bench, cases: Cases) -> None:
        """Measure the missing cases; print and save the report.

        Compares schedules on the size of micro-batches that is fastest under the strategy's own schedule.
        """
        by_name = {case.name: case for case in cases.first()}
        self._measure(bench, by_name)
        pipelined = [case for case in by_name.values() if case.kind == "pipelined" and case.name in self.rows]
        size = min(pipelined, key=lambda case: mean_seconds(self.rows[case.name])).size if pipelined else None
        if size is not None:
            for case in cases.side_by_side(size):
                by_name.setdefault(case.name, case)
            self._measure(bench, by_name)
        rows = self.write(by_name)
        self.finish(report(self.header, rows, self.timelines, by_name, size, self.missing(cases.unfit)))

    def _measure(self, bench: Bench, cases: Mapping[str, Case]) -> None:
        def measure_case(case: Case) -> StepTiming:
            row, timeline = bench.measure(case)
            row["speedup"] = mean_seconds(self.rows.get(ONE, row)) / mean_seconds(row)
            row["share_of_bound"] = None if case.bubble_bound is None else row["speedup"] / case.bubble_bound
            if timeline["events"]:
                self.timelines[case.name] = timeline
                write_json(self._file, self.timelines)
            return row

        self.measure({name: partial(measure_case, case) for name, case in cases.items()})
