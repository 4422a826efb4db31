"""The study of communication: the time of messages and collectives over several backends."""

from harness.reports.report import Facts
from harness.runs import signals
from harness.studies import study
from harness.studies.comm.cases import Backend, Case, Cases, Options
from harness.studies.comm.measure import Bench, RendezvousError
from harness.studies.comm.report import report

__all__ = ["Backend", "Bench", "Case", "Cases", "Options", "Study"]


class Study(study.Study):
    """Measures the cases of each backend in one go; rows are named by `name`."""

    def line(self, row: Facts) -> str:
        """The case and its latency."""
        return f"{row['name']:52} {row['latency_us']:12,.1f} µs"

    def run(self, bench: Bench, cases: Cases) -> None:
        """Measure the missing cases; print and save the report."""
        for backend in cases.backends:
            while missing := [case for case in cases.of(backend) if not self.has(case.name)]:
                self._measure(bench, backend, missing)
        wrong = [name for name, row in self.rows.items() if not row["correct"]]
        notes = [f"{name}: {reason}." for name, reason in self.missing({}).items()]
        notes += [f"{name}: the result is WRONG." for name in wrong]
        self.finish(report(self.write(case.name for case in cases.all()), notes), failed=bool(wrong))

    def _measure(self, bench: Bench, backend: Backend, missing: list[Case]) -> None:
        """Measure until all are there or one fails; the others then need new ranks."""
        try:
            for case, row in bench.measure(backend, missing):
                self.keep(case.name, row, self.rows)
        except RendezvousError as error:
            self.fail(error.why, *(case.name for case in missing))
        except Exception as error:  # whatever it is: other cases don't depend on it
            signals.stop_if_requested()
            under_way = next((case.name for case in missing if not self.has(case.name)), None)
            if under_way is None:
                raise
            self.fail(error, under_way)
