"""What may differ from the run that is resumed: what no result depends on, and what the run grows by."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from apprentice.errors import BadInput
from harness.cli.sources import PLACES, free

NOTHING = "(nothing)"


def check_same(
    before: Mapping[str, Any],  # the run's settings by flag
    after: Mapping[str, Any],
    folder: Path,
    grows: Collection[str],  # flags of what may become more
    fixed: Mapping[str, str],  # why others may not change, where that is not plain
    new: Collection[str],  # flags of choices by name that the run did not use
) -> None:
    """Raise BadInput for the first setting that differs and has to stay."""
    for flag in dict.fromkeys([*after, *before]):
        was, now = before.get(flag, NOTHING), after.get(flag, NOTHING)
        if (was == now and type(was) is type(now)) or free(flag) or flag in PLACES:  # 1 batch is not 1.0 of all
            continue
        if flag in grows and _more(flag, was, now):
            continue
        if not any(flag == key or flag.startswith(f"{key}.") for key in new):
            unset = was in (None, NOTHING)
            least = f"no --{flag}" if unset else f"{was} or more" if flag in grows else str(was)
            reasons = [why for key, why in fixed.items() if flag == key or flag.startswith(f"{key}.")]
            why = "".join(f": {reason}" for reason in reasons)
            expected = f"{least}, as the run in {folder} was started{why}; leave it out, or take another --out"
            raise BadInput(flag, now, expected)


def _more(flag: str, was: Any, now: Any) -> bool:
    """Whether a list has all of the entries before, a number is larger, or a switch is now on; -1 and None are none."""
    if isinstance(was, list):
        return set(was) <= set(now) if isinstance(now, list) else flag == "only"  # without --only, all are wanted
    return now is True if was is False else type(was) is type(now) is int and 0 < was < now
