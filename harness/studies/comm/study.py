"""A run of the study: the rows that are missing are measured, and all are told."""

from harness.runs import signals
from harness.studies.comm.bench import Backend, Bench, NeverMetError
from harness.studies.comm.report import save, text
from harness.studies.comm.rows import Row, Rows
from harness.studies.kept import ResumableResults


class Study:
    """A run that is new or goes on.

    Args:
        kept: what there is of it, by `name`.
    """

    def __init__(self, kept: ResumableResults) -> None:
        self.kept = kept

    def run(self, bench: Bench, rows: Rows) -> None:
        """Measure the rows that are missing, print and save what they say.

        Args:
            bench: measures.
            rows: what there is to measure.

        Raises:
            SystemExit: a row failed, or its result was wrong; the others are there.
        """
        for backend in rows.backends:
            while missing := [row for row in rows.of(backend) if not self._has(row)]:
                self._measure(bench, backend, missing)
        results = self.kept.write(row.name for row in rows.all())
        wrong = [name for name, row in self.kept.rows.items() if not row["correct"]]
        notes = [f"{name}: failed: {line}." for name, line in self.kept.failed.items()]
        notes += [f"{name}: the result is WRONG." for name in wrong]
        save(self.kept.out, results, notes)
        print(f"{text(results, notes)}\n\n{self.kept.out}/results.md, .png, .json")
        if self.kept.failed or wrong:
            raise SystemExit(1)

    def _has(self, row: Row) -> bool:
        return row.name in self.kept.rows or row.name in self.kept.failed

    def _measure(self, bench: Bench, backend: Backend, missing: list[Row]) -> None:
        """Measure until all are there or one fails, which costs no other one."""
        left = iter(missing)
        under_way = next(left)
        try:
            for row, facts in bench.measure(backend, missing):
                self.kept.rows[row.name] = facts
                self.kept.write(self.kept.rows)
                print(f"{row.name:52} {facts['latency_us']:12,.1f} µs", flush=True)
                under_way = next(left, row)
        except NeverMetError as error:
            self.kept.fail(error.why, *(row.name for row in missing))
        except Exception as error:  # whatever it is: other rows don't depend on it
            if self._has(under_way):
                signals.stop_if_requested()
                raise
            self.kept.fail(error, under_way.name)
