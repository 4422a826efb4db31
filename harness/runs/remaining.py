"""How long a run will still take, by the fits that it has finished."""

from collections.abc import Sequence
from pathlib import Path

from harness.runs.plans import FitPlan
from harness.runs.progress import Rest, clock
from harness.runs.records import FitRecord


def estimate_rest(out: Path, plans: Sequence[FitPlan], current: FitPlan) -> Rest | None:
    """Estimate the rest of the run, of these fits in their order, for the display of the current one.

    An epoch to come takes as long as those of the last finished fit of its name, or as those of this one; where neither
    is known, the time is a lower bound. None where nothing follows.
    """
    records = {path: FitRecord.read(path) for plan in plans if (path := plan.record(out)).exists()}
    trained = {path: _units(record.max_epochs) for path, record in records.items()}
    measured = {path.stem: (record.fit_seconds or 0.0) / trained[path] for path, record in records.items()}
    missing = [(plan.name, _units(plan.epochs) - trained.get(plan.record(out), 0)) for plan in plans if plan != current]
    to_come = [(name, epochs) for name, epochs in missing if epochs > 0]

    def rest(left: float, whole: float) -> str:
        paces = {**measured, current.name: whole / _units(current.epochs)}
        sign = "" if all(name in paces for name, _ in to_come) else "more than "
        seconds = left + sum(paces.get(name, 0.0) * epochs for name, epochs in to_come)
        return f", {sign}{clock(seconds)} of the run"

    return rest if to_come else None


def _units(epochs: int | None) -> int:
    """Return epochs; 1 for a fit that has a number of steps, or none."""
    return max(epochs or 1, 1)
