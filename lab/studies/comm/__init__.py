"""The study of communication: the time of messages and collectives over several backends."""

from collections.abc import Sequence

from harness.runs import signals
from harness.studies import study
from lab.studies.comm.cases import Backend, Case, Options, all_cases
from lab.studies.comm.measure import Bench, MessageTiming
from lab.studies.comm.report import report

__all__ = ["Backend", "Bench", "Case", "Options", "Study", "all_cases"]


class Study(study.Study[MessageTiming]):
    """Measures the cases of each backend in one go; rows are named by `name`."""

    def line(self, row: MessageTiming) -> str:
        return f"{row['name']:52} {row['latency_us']:12,.1f} µs"

    def run(self, bench: Bench, cases: Sequence[Case]) -> None:
        for backend in dict.fromkeys(case.backend for case in cases):
            while missing := [case for case in cases if case.backend == backend and not self.has(case.name)]:
                self._measure(bench, backend, missing)
        wrong = [name for name, row in self.rows.items() if not row["correct"]]
        notes = [f"{name}: {reason}." for name, reason in self.missing({}).items()]
        notes += [f"{name}: the result is WRONG." for name in wrong]
        rows = self.write(case.name for case in cases)
        self.finish(report(self.header, rows, notes), failed=bool(wrong))

    def _measure(self, bench: Bench, backend: Backend, missing: Sequence[Case]) -> None:
        """Measure until all are done or one fails; the rest then needs new ranks."""
        running = [case.name for case in missing]  # all of them, until the ranks have met
        try:
            for row in bench.measure(backend, missing):
                if row is not None:
                    self.keep(row["name"], row, self.rows)
                running = [case.name for case in missing if not self.has(case.name)][:1]
        except Exception as error:  # whatever it is: other cases don't depend on it
            signals.stop_if_requested()
            if not running:
                raise
            self.fail(error, *running)
