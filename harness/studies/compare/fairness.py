"""Whether the rows of two runs can be compared, and whether a difference between them belongs to their methods."""

from collections.abc import Sequence
from typing import Any

from datamodules.fingerprints import changed_parts
from harness.cli.resuming import PLACES
from harness.reports.settings import is_off
from harness.reports.tables import join_words
from harness.studies.compare.runs import FinishedRun
from lit_modules.nets.identity import Change

BY_VALIDATION = ("best_epoch", "early_stopping")  # these choose weights by it
# These move no weights, unless a callback looks at what is validated.
VALIDATION = {
    f"trainer.{name}"
    for name in ("num_sanity_val_steps", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch")
}
# What these make of the data is in their fingerprint, and in the sizes beside it.
IN_FINGERPRINT = {
    *PLACES, "data.tokenizer", "data.template", "data.train_size", "data.validation_size", "data.test_size",
    "trainer.limit_test_batches",
}  # fmt: skip
OF_NETS = "name", "weights", "members"  # options that say where a net's configuration and weights lie


def why_not_comparable(first: FinishedRun, run: FinishedRun) -> str:
    """Say why runs can't be compared; empty if both had the same samples, and a seed in common."""
    ours, theirs = run.results.data, first.results.data
    if other := [key for key in ("name", "train", "test") if ours.get(key) != theirs.get(key)]:
        return f"other data ({', '.join(f'{key} {ours.get(key)}, not {theirs.get(key)}' for key in other)})"
    classes = [sorted(side.results.classes) for side in (run, first)]
    if all(classes) and classes[0] != classes[1]:  # in another order they are the same
        return "other data (of other classes)"
    if parts := changed_parts(first.results.fingerprint, run.results.fingerprint):
        return f"other data (other samples in {join_words(parts)})"
    if not set(run.seeds) & set(first.seeds):
        return f"no seed in common ({join_words([str(seed) for seed in run.seeds])})"
    return ""


def known_by_content(first: FinishedRun, run: FinishedRun) -> set[str]:
    """Return the settings that choose data and nets whose content the runs know to be the same or not."""
    known, changes = {*IN_FINGERPRINT}, changed_nets(first, run)
    for key in changes:
        flag = key.partition(" ")[0]  # of each seed's teacher, if each has its own
        if not any(change for other, change in changes.items() if other.partition(" ")[0] == flag):
            known |= {f"{flag}.{name}" for name in OF_NETS} | {f"{flag}_ckpt"}
    return known


def changed_nets(first: FinishedRun, run: FinishedRun) -> dict[str, Change | None]:
    """Return, by its flag, what differs in each net of both runs that begins with files."""
    ours, theirs = run.results.origins, first.results.origins
    return {key: theirs[key].change(ours[key]) for key in theirs if key in ours}


def other_settings(run: FinishedRun, first: FinishedRun) -> dict[str, tuple[Any, Any]]:
    """Return both values, by flag, where two runs trained differently but for their methods' options.

    Where a class differs, its options are left out.
    """
    idle = idle_settings([run, first]) | known_by_content(first, run)
    ours, theirs = _training(run, idle), _training(first, idle)
    differ = [flag for flag in {**theirs, **ours} if not same(flag, ours.get(flag), theirs.get(flag))]
    inside = [flag for flag in differ if any(flag.startswith(f"{other}.") for other in differ)]
    settings = {flag: (ours.get(flag), theirs.get(flag)) for flag in differ if flag not in inside}
    changes = {key: change for key, change in changed_nets(first, run).items() if change}
    return settings | {f"{key}: {change.what}": (change.now, change.before) for key, change in changes.items()}


def same(flag: str, one: Any, other: Any) -> bool:
    """Return whether two values of a setting are equal, or both off.

    Of samples and batches 1 is a count, and 1.0 stands for all.
    """
    if is_off(one) and is_off(other):
        return True
    return one == other and (type(one) is type(other) or not flag.endswith(("_batches", "_interval", "_size")))


def _training(run: FinishedRun, idle: set[str]) -> dict[str, Any]:
    left_out = {"seeds", *run.experiment.methods, *idle}  # seeds are paired
    return {
        flag: value
        for flag, value in run.settings.items()
        if flag != "data" and not run.is_free(flag) and left_out.isdisjoint({flag, flag.partition(".")[0]})
    }


def idle_settings(runs: Sequence[FinishedRun]) -> set[str]:
    """Return settings that move no figure of these runs' rows, beside those that a resumed run may change."""
    validated = [value for run in runs for flag, value in run.settings.items() if flag in BY_VALIDATION]
    callbacks = any(flag.startswith("trainer.callbacks.") for run in runs for flag in run.settings) or any(validated)
    idle = set().union(*(run.experiment.idle for run in runs))
    idle |= {f"data.{name}" for name in frozenset.intersection(*(run.data.free_options for run in runs))}
    return idle if callbacks else idle | VALIDATION
