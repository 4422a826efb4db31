"""Successive halving (Jamieson and Talwalkar 2016): when settings are compared, which go on, and from what state."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.reports.metrics import Metric
from harness.runs import safepoints
from harness.runs.files import atomic
from harness.runs.records import NetRecord

# Lists of a scheduler's state with an entry for each parameter group.
OF_GROUPS = {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "lr_lambdas", "base_momentums", "max_momentums"}
OF_RUNS = ("train_sums", "validated")  # of a Learner's state, by `<run>/<what>`


def ends(epochs: int) -> list[int]:
    """The epochs at which settings are compared: after a third, after two thirds, at the end."""
    return sorted({math.ceil(epochs / 3), math.ceil(2 * epochs / 3), epochs})


def best(scores: Mapping[int, float | None], metric: Metric, count: int) -> list[int]:
    """So many settings, in their own order: those with the best scores; of equals the first, and failed ones last."""

    def rank(trial: int) -> float:
        score = scores[trial]
        return math.inf if score is None else -score if metric.higher_is_better else score

    return sorted(sorted(scores, key=rank)[:count])


def score(net: NetRecord, metric: Metric) -> float | None:
    """The last score of validation in a student's record; None if it failed, or was not validated."""
    return None if net.failed else metric.last(net.epochs)


def carry(before: Path, after: Path, runs: Sequence[str], kept: Collection[str]) -> None:
    """Write the checkpoint of a fit for some of its runs, from which they go on alone.

    Args:
        before: of the fit of all `runs`, in the order of its parameter groups.
        after: where it is written.
        runs: names of the runs.
        kept: those that go on.
    """
    state = safepoints.read(before)
    places = [place for place, run in enumerate(runs) if run in kept]
    dropped = tuple(f"{run}/" for run in runs if run not in kept)
    parameters = tuple(f"students.{run}." for run in runs if run not in kept)
    state["state_dict"] = {key: value for key, value in state["state_dict"].items() if not key.startswith(parameters)}
    state["optimizer_states"] = [_groups(each, places) for each in state["optimizer_states"]]
    state["lr_schedulers"] = [_of_groups(each, places) for each in state["lr_schedulers"]]
    learner = state["learner"]
    for name in OF_RUNS:
        learner[name] = {key: value for key, value in learner[name].items() if not key.startswith(dropped)}
    learner["epochs"] = [
        {key: value for key, value in each.items() if not key.startswith(dropped)} for each in learner["epochs"]
    ]
    for name in ("failed", "loss_scales"):
        learner[name] = {run: value for run, value in learner[name].items() if run in kept}
    learner["asked"] = 0
    state["callbacks"]["SafePoints"] |= {"finished": False, "seconds": 0.0}
    state.pop("hyper_parameters", None)
    with atomic(after) as temporary:
        torch.save(state, temporary)


def _groups(state: dict[str, Any], places: Sequence[int]) -> dict[str, Any]:
    """An optimizer's state with some of its groups, whose parameters are numbered anew."""
    groups = [state["param_groups"][place] for place in places]
    numbers = {old: new for new, old in enumerate(old for group in groups for old in group["params"])}
    return {
        "state": {numbers[old]: value for old, value in state["state"].items() if old in numbers},
        "param_groups": [{**group, "params": [numbers[old] for old in group["params"]]} for group in groups],
    }


def _of_groups(state: Any, places: Sequence[int]) -> Any:
    """A scheduler's state with the rates of some groups; one that is made of others has theirs inside."""
    if isinstance(state, dict):
        return {
            key: [value[place] for place in places]
            if key in OF_GROUPS and isinstance(value, list)
            else _of_groups(value, places)
            for key, value in state.items()
        }
    return [_of_groups(each, places) for each in state] if isinstance(state, list) else state
