"""A run of the study: the rows that are missing are measured, and all are told."""

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from harness.runs.files import write_json
from harness.studies.kept import ResumableResults
from harness.studies.pipeline.bench import Bench
from harness.studies.pipeline.report import Found, save, text
from harness.studies.pipeline.rows import ONE, Row, Rows

Facts = dict[str, Any]


class Study:
    """A run that is new or goes on.

    Args:
        kept: what there is of it, by `name`.
    """

    def __init__(self, kept: ResumableResults) -> None:
        self.kept, self._file = kept, kept.out / "timelines.json"
        resumed = bool(self.kept.rows) and self._file.exists()
        self.timelines: dict[str, Facts] = json.loads(self._file.read_text()) if resumed else {}
        rows = self.kept.rows.items()
        self.kept.rows = {name: row for name, row in rows if row["schedule"] is None or name in self.timelines}

    def run(self, bench: Bench, rows: Rows) -> None:
        """Measure the rows that are missing, print and save what they say.

        Args:
            bench: measures.
            rows: what there is to measure; the schedules are compared with micro-batches of the fastest size.

        Raises:
            SystemExit: a row failed; the others are there.
            Exception: what ended the fit on one device: nothing can be compared then.
        """
        first = rows.first()
        self._measure(bench, first)
        best = self._fastest(first)
        every = first
        if best is not None:
            known = {row.name for row in first}
            more = [*rows.side_by_side(best.size), *rows.inside(best.size)]
            every = [*first, *(row for row in more if row.name not in known)]
            self._measure(bench, every)
        found = Found(self._write(every), self.timelines, every, best, self.kept.missing(rows.unfit))
        save(self.kept.out, found)
        print(f"{text(found)}\n\n{self.kept.out}/results.md, .png, .json, timeline.png, timelines.json")
        if self.kept.failed:
            raise SystemExit(1)

    def _fastest(self, rows: Iterable[Row]) -> Row | None:
        """Of the pipelined rows that could be measured."""
        there = [row for row in rows if row.kind == "pipelined" and row.name in self.kept.rows]
        return min(there, key=lambda row: statistics.mean(self._seconds(row.name)), default=None)

    def _seconds(self, name: str) -> list[float]:
        return self.kept.rows[name]["seconds_per_step"]

    def _measure(self, bench: Bench, rows: Sequence[Row]) -> None:
        by_name = {row.name: row for row in rows}

        def add(name: str) -> None:
            self._add(by_name[name], *bench.measure(by_name[name]))
            self._write(rows)

        self.kept.measure(by_name, add, ONE)

    def _add(self, row: Row, facts: Facts, timeline: Facts) -> None:
        mean = statistics.mean(facts["seconds_per_step"])
        one = mean if row.name == ONE else statistics.mean(self._seconds(ONE))
        speedup, bound = one / mean, row.bubble_bound
        share = None if bound is None else speedup / bound
        self.kept.rows[row.name] = {**facts, "speedup": speedup, "bubble_bound": bound, "share_of_bound": share}
        if timeline["events"]:
            self.timelines[row.name] = timeline
            write_json(self._file, self.timelines)
        print(f"{row.name:52} {mean:8.3f} s a step", flush=True)

    def _write(self, rows: Sequence[Row]) -> Facts:
        """Keep what is measured: these rows first, in their order, and those of an earlier session that come later."""
        return self.kept.write(dict.fromkeys([*(row.name for row in rows), *self.kept.rows]))
