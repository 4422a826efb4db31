"""What a resumed run may do with each option: declared where the option is, checked here."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from apprentice.errors import BadInput

NOTHING = "(nothing)"
# Where data lie: a run that goes on knows its samples by their fingerprint.
PLACES = ("data.root", "data.path")
# What runs did before there was an option whose default is another, and what had to be set for it.
EARLIER = {"data.labelled_by": ("data.labelled", "split")}
# Options that left the data modules: a run in which they were off goes on without them.
LEFT = frozenset({"data.balanced", "data.augment_repeats"})


@dataclass(frozen=True)
class OnResume:
    """How an option may differ from that of the run that is resumed, and the reason where it may not.

    `call` is no setting of an experiment, but of one call; on `free` no result depends; `grows` lets a list have more
    entries, a number be larger and a switch be on; `fixed` allows no change.
    """

    change: Literal["call", "free", "grows", "fixed"] = "fixed"
    why: str = ""


CALL, FREE, GROWS, FIXED = OnResume("call"), OnResume("free"), OnResume("grows"), OnResume("fixed")


def rules_of(options: type) -> dict[str, OnResume]:
    """Return what each option of a dataclass declares."""
    return {field.name: field.metadata.get("on_resume", FIXED) for field in fields(options)}


def earlier_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by flag, what a run did whose settings lack an option of today."""
    lacking = ((flag, *then) for flag, then in EARLIER.items() if flag not in saved)
    return {flag: value for flag, beside, value in lacking if saved.get(beside) is not None}


def check_same(
    before: Mapping[str, Any],  # the run's settings by flag
    after: Mapping[str, Any],
    folder: Path,
    on_resume: Callable[[str], OnResume],  # of a flag
    new: Collection[str],  # flags of choices by name that the run did not use
) -> None:
    """Raise BadInput for the first setting that differs and has to stay."""
    for flag in dict.fromkeys([*after, *before]):
        was, now, rule = before.get(flag, NOTHING), after.get(flag, NOTHING), on_resume(flag)
        if (was == now and type(was) is type(now)) or flag in PLACES:  # 1 batch is not 1.0 of all
            continue
        grows = rule.change == "grows"
        if rule.change in {"call", "free"} or (grows and _is_more(flag, was, now)):
            continue
        if not any(flag == key or flag.startswith(f"{key}.") for key in new):
            least = f"no --{flag}" if was in (None, NOTHING) else f"{was} or more" if grows else str(was)
            why = f": {rule.why}" if rule.why else ""
            expected = f"{least}, as the run in {folder} was started{why}; leave it out, or take another --out"
            raise BadInput(flag, now, expected)


def _is_more(flag: str, was: Any, now: Any) -> bool:
    """Return whether a list has all earlier entries, a number is larger, or a switch is on; -1 and None are none."""
    if isinstance(was, list):
        return set(was) <= set(now) if isinstance(now, list) else flag == "only"  # without --only, all are wanted
    return now is True if was is False else type(was) is type(now) is int and 0 < was < now
