"""Checkpoints of modules with several runs, from which some of these go on alone."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

BY_RUN = {"failed", "stopped", "loss_scales", "written_ahead", "learned_texts"}
# Lists of a scheduler's state with an entry for each parameter group.
OF_GROUPS = {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums"}


def save_parts(checkpoint: dict[str, Any], parts: Iterable[Any]) -> None:
    """Write what a loop and its parts say in `saved`."""
    checkpoint["learner"] = {name: getattr(part, name) for part in parts for name in part.saved}


def load_parts(checkpoint: Mapping[str, Any], parts: Iterable[Any]) -> None:
    """Read this back; names that an older checkpoint lacks stay as they are."""
    state = checkpoint["learner"]
    for part in parts:
        vars(part).update({name: state[name] for name in part.saved if name in state})


def keep_students(checkpoint: dict[str, Any], students: Sequence[str], kept: Collection[str]) -> None:
    """Leave in a checkpoint of these students, in the order of their groups, that from which some go on alone."""
    dropped = [name for name in students if name not in kept]
    for part in ("students.", "averages."):
        checkpoint["state_dict"] = drop_runs(checkpoint["state_dict"], dropped, part, ".")
    keep_runs(checkpoint, students, kept)
    checkpoint["learner"]["teacher_samples"] = 0


def keep_runs(checkpoint: dict[str, Any], runs: Sequence[str], kept: Collection[str]) -> None:
    """Leave in the checkpoint of a Loop what it says of some runs; `runs` are all, in the order of their groups."""
    dropped = [run for run in runs if run not in kept]
    learner = checkpoint["learner"]
    (optimizer,) = checkpoint["optimizer_states"]
    number = len(optimizer["param_groups"]) // len(runs)  # of groups of each run
    places = [number * place + group for place, run in enumerate(runs) if run in kept for group in range(number)]
    checkpoint["optimizer_states"] = [keep_groups(state, places) for state in checkpoint["optimizer_states"]]
    checkpoint["lr_schedulers"] = [keep_rates(state, places) for state in checkpoint["lr_schedulers"]]
    for name in ("train_sums", "validated"):
        learner[name] = drop_runs(learner[name], dropped)
    learner["epochs"] = [drop_runs(values, dropped) for values in learner["epochs"]]
    for name in BY_RUN & learner.keys():
        learner[name] = {run: value for run, value in learner[name].items() if run in kept}


def drop_runs(state: Mapping[str, Any], runs: Collection[str], prefix: str = "", suffix: str = "/") -> dict[str, Any]:
    """The values but those of some runs, whose names begin with the run's between `prefix` and `suffix`."""
    beginnings = tuple(f"{prefix}{run}{suffix}" for run in runs)
    return {name: value for name, value in state.items() if not name.startswith(beginnings)}


def keep_groups(state: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """An optimizer's state with the groups at these places, whose parameters are numbered anew."""
    groups = [state["param_groups"][place] for place in places]
    numbers = {old: new for new, old in enumerate(old for group in groups for old in group["params"])}
    return {
        "state": {numbers[old]: value for old, value in state["state"].items() if old in numbers},
        "param_groups": [{**group, "params": [numbers[old] for old in group["params"]]} for group in groups],
    }


def keep_rates(state: Any, places: Sequence[int]) -> Any:
    """A scheduler's state with the rates of the groups at these places, also of the schedulers that it is made of."""
    if isinstance(state, list):
        return [keep_rates(inner, places) for inner in state]
    if not isinstance(state, dict):
        return state
    return {
        key: [value[place] for place in places]
        if key in OF_GROUPS and isinstance(value, list)
        else keep_rates(value, places)
        for key, value in state.items()
    }
