"""How long a run will still take, by the fits that it has finished."""

from collections.abc import Mapping

from harness.runs.progress import Rest, clock
from harness.runs.records import FitRecord
from harness.runs.session import Session

Plan = Mapping[tuple[int, str], int | None]  # epochs of each seed's fits, in order; None where a net is only tested


def remaining(run: Session, plan: Plan, seed: int, name: str) -> Rest | None:
    """What a display says of the whole run during the fit `name` of a seed.

    An epoch to come takes as long as those of the last finished fit of its name, or as those of this one; where neither
    is known, the time is a lower bound. None where nothing follows.
    """
    paths = {(s, fit): run.out / f"seed{s}" / f"{fit}.json" for s, fit in plan}
    records = {key: FitRecord.read(path) for key, path in paths.items() if path.exists()}
    had = {key: _units(record.max_epochs) for key, record in records.items()}
    pace = {key[1]: (record.fit_seconds or 0.0) / had[key] for key, record in records.items()}
    missing = {key: _units(epochs) - had.get(key, 0) for key, epochs in plan.items() if key != (seed, name)}
    to_come = {key: epochs for key, epochs in missing.items() if epochs > 0}

    def rest(left: float, whole: float) -> str:
        paces = {**pace, name: whole / _units(plan[seed, name])}
        sign = "" if all(fit in paces for _, fit in to_come) else "more than "
        seconds = left + sum(paces.get(fit, 0.0) * epochs for (_, fit), epochs in to_come.items())
        return f", {sign}{clock(seconds)} of the run"

    return rest if to_come else None


def _units(epochs: int | None) -> int:
    """Epochs; 1 for a fit that has a number of steps, or none."""
    return max(epochs or 1, 1)
