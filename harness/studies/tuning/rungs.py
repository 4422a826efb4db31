"""Successive halving (Jamieson and Talwalkar 2016): when settings are compared, which go on, and from what state."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from harness.runs import safepoints
from harness.runs.files import atomic
from harness.runs.records import NetRecord
from lit_modules.distillation import Distillation
from lit_modules.tasks import Metric


def ends(epochs: int) -> list[int]:
    """Return the epochs at which settings are compared: after a third, after two thirds, at the end."""
    return sorted({math.ceil(epochs / 3), math.ceil(2 * epochs / 3), epochs})


def best(scores: Mapping[int, float | None], metric: Metric, count: int) -> list[int]:
    """Return `count` settings with the best scores, in their own order; of equals the first, failed ones last."""

    def rank(trial: int) -> float:
        score = scores[trial]
        return math.inf if score is None else -score if metric.higher_is_better else score

    return sorted(sorted(scores, key=rank)[:count])


def score(net: NetRecord, metric: Metric) -> float | None:
    """Return the last score of validation in a student's record; None if it failed, or was not validated."""
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
    Distillation.keep_students(state, runs, kept)
    state["callbacks"]["SafePoints"] |= {"finished": False, "seconds": 0.0}
    state.pop("hyper_parameters", None)
    with atomic(after) as temporary:
        torch.save(state, temporary)
