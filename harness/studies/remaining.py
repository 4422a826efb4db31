"""How long a run will still take, by the fits that it has finished."""

from collections.abc import Sequence

from harness.reports.results import load_record
from harness.runs.progress import Rest, clock
from harness.runs.session import Session


def remaining(run: Session, fits: Sequence[str], seed: int, name: str) -> Rest | None:
    """What a display says of the whole run during the fit `name` of a seed; `fits` are those of each seed, in order.

    A fit to come takes as long as the last finished one of its name, or as this one; where neither is known, the time
    is a lower bound. None where nothing follows.
    """
    records = {(s, fit): run.out / f"seed{s}" / f"{fit}.json" for s in run.config.seeds for fit in fits}
    done = {key: load_record(path)["fit_seconds"] for key, path in records.items() if path.exists()}
    known = {fit: seconds or 0.0 for (_, fit), seconds in done.items()}
    to_come = [fit for s, fit in records if (s, fit) not in done and (s, fit) != (seed, name)]

    def rest(left: float, whole: float) -> str:
        seconds = {**known, name: whole}
        sign = "" if seconds.keys() >= set(to_come) else "more than "
        return f", {sign}{clock(left + sum(seconds.get(fit, 0.0) for fit in to_come))} of the run"

    return rest if to_come else None
