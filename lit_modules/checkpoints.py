"""Checkpoints of modules with several runs, from which some of these go on alone."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Lists of a scheduler's state with an entry for each parameter group.
OF_GROUPS = {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums"}


def keep_runs(checkpoint: dict[str, Any], runs: Sequence[str], kept: Collection[str]) -> None:
    """Leave in the checkpoint of a Learner what it says of some runs; `runs` are all, in the order of their groups."""
    dropped = [run for run in runs if run not in kept]
    learner = checkpoint["learner"]
    (optimizer,) = checkpoint["optimizer_states"]
    number = len(optimizer["param_groups"]) // len(runs)  # of groups of each run
    places = [number * place + group for place, run in enumerate(runs) if run in kept for group in range(number)]
    checkpoint["optimizer_states"] = [keep_groups(state, places) for state in checkpoint["optimizer_states"]]
    checkpoint["lr_schedulers"] = [keep_rates(state, places) for state in checkpoint["lr_schedulers"]]
    for name in ("train_sums", "validated"):
        learner[name] = without(learner[name], dropped)
    learner["epochs"] = [without(values, dropped) for values in learner["epochs"]]
    for name in ("failed", "stopped", "loss_scales"):
        learner[name] = {run: value for run, value in learner[name].items() if run in kept}


def without(values: Mapping[str, Any], runs: Collection[str], before: str = "", after: str = "/") -> dict[str, Any]:
    """The values but those of some runs, whose names begin with the run's between `before` and `after`."""
    beginnings = tuple(f"{before}{run}{after}" for run in runs)
    return {name: value for name, value in values.items() if not name.startswith(beginnings)}


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
