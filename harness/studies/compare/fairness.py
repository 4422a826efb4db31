"""Whether the rows of two runs can be compared, and whether a difference between them belongs to their methods."""

from collections.abc import Sequence
from typing import Any

from datamodules.fingerprints import changed_parts
from harness.cli.resuming import PLACES
from harness.reports.settings import is_off
from harness.reports.tables import join_words
from harness.studies.compare.runs import Run
from lit_modules.nets.identity import Change

# With these options of the Trainer, `data` in results.json has the size of the part that was used.
LIMITS = {"validation": "limit_val_batches", "test": "limit_test_batches"}
BY_VALIDATION = ("best_epoch", "early_stopping")  # these choose weights by it
# These move no weights, unless a callback looks at what is validated.
VALIDATION = {
    f"trainer.{name}"
    for name in ("num_sanity_val_steps", "limit_val_batches", "val_check_interval", "check_val_every_n_epoch")
}
OF_TOKENS = "data.tokenizer", "data.template"  # what they make of a text is in the fingerprint of the data
OF_NETS = "name", "weights", "members"  # options that say where a net's configuration and weights lie
CONTEXT = "block_size"  # of a text: each held-out token is tested once, whatever it is


def why_not_comparable(first: Run, run: Run) -> str:
    """Say why runs can't be compared; empty if both had the same samples, and a seed in common."""
    flags = [(part, f"trainer.{option}") for part, option in LIMITS.items()]
    limits = [(part, side.settings.get(flag)) for part, flag in flags for side in (first, run)]
    limited = {part for part, limit in limits if repr(limit) not in {"None", "1.0"}}  # 1 is one batch, 1.0 all
    ours, theirs = _samples(run, limited), _samples(first, limited)
    keys = {*ours, *theirs} - ignored_places(first, run)
    other = [key for key in sorted(keys) if ours.get(key) != theirs.get(key)]
    if other:
        return f"other data ({', '.join(f'{key} {ours.get(key)}, not {theirs.get(key)}' for key in other)})"
    classes = [sorted(side.classes) for side in (run, first)]
    if all(classes) and classes[0] != classes[1]:  # in another order they are the same
        return "other data (of other classes)"
    if parts := [part for part in other_samples(first, run) if part not in limited]:
        return f"other data (other samples in {join_words(parts)})"
    if not set(run.seeds) & set(first.seeds):
        return f"no seed in common ({join_words([str(seed) for seed in run.seeds])})"
    return ""


def other_samples(first: Run, run: Run) -> list[str]:
    """Return the parts of the data whose samples differ; none where a run has no fingerprint."""
    fingerprints = first.results.fingerprint, run.results.fingerprint
    return changed_parts(*fingerprints) if all(fingerprints) else []


def ignored_places(first: Run, run: Run) -> set[str]:
    """Return the settings that say where data and nets lie, if the runs know whether these are the same."""
    places = {*PLACES, *OF_TOKENS} if first.results.fingerprint and run.results.fingerprint else set()
    changes = changed_nets(first, run)
    for key in changes:
        flag = key.partition(" ")[0]  # of each seed's teacher, if each has its own
        if not any(change for other, change in changes.items() if other.partition(" ")[0] == flag):
            places |= {f"{flag}.{name}" for name in OF_NETS} | {f"{flag}_ckpt"}
    return places


def changed_nets(first: Run, run: Run) -> dict[str, Change | None]:
    """Return, by its flag, what differs in each net of both runs that begins with files."""
    ours, theirs = run.results.origins, first.results.origins
    return {key: theirs[key].change(ours[key]) for key in theirs if key in ours}


def _samples(run: Run, limited: set[str]) -> dict[str, Any]:
    """Return what decides which samples a run saw: the data set, its sizes, and the settings that choose from it.

    Of `limited` parts one of the two runs used only some batches: there, the option for the size decides.
    """
    ignored = run.data.free_options | run.data.training_options | ({CONTEXT} if "test" not in limited else set())
    ignored |= {f"{part}_size" for part in ("train", "validation", "test") if part not in limited}
    names = {flag: flag.removeprefix("data.").partition(".")[0] for flag in run.settings if flag.startswith("data.")}
    chosen = {flag: run.settings[flag] for flag, name in names.items() if name not in ignored}
    sizes = {key: value for key, value in run.results.data.items() if key != "validation" or key not in limited}
    return {**sizes, **chosen}


def other_settings(run: Run, first: Run) -> dict[str, tuple[Any, Any]]:
    """Return both values, by flag, where two runs trained differently but for their methods' options.

    Where a class differs, its options are left out.
    """
    idle = idle_settings([run, first]) | ignored_places(first, run)
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


def _training(run: Run, idle: set[str]) -> dict[str, Any]:
    data = {f"data.{name}" for name in {*run.data.training_options, CONTEXT}}
    left_out = {"data", "seeds", "trainer.limit_test_batches", *run.experiment.methods, *idle}  # seeds are paired
    return {
        flag: value
        for flag, value in run.settings.items()
        if not run.is_free(flag) and (flag in data or left_out.isdisjoint({flag, flag.partition(".")[0]}))
    }


def idle_settings(runs: Sequence[Run]) -> set[str]:
    """Return settings that move no figure of these runs' rows, beside those that a resumed run may change."""
    validated = [value for run in runs for flag, value in run.settings.items() if flag in BY_VALIDATION]
    callbacks = any(flag.startswith("trainer.callbacks.") for run in runs for flag in run.settings) or any(validated)
    idle = set().union(*(run.experiment.idle for run in runs))
    idle |= {f"data.{name}" for name in frozenset.intersection(*(run.data.free_options for run in runs))}
    return idle if callbacks else idle | VALIDATION
