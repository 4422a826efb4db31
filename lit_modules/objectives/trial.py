"""Tests an objective before training: each term must have one value for each row, which depends on that row alone."""

import copy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from apprentice.errors import BadInput
from apprentice.keyed import with_seed
from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Objective, Term

RANGES = (0, 1), (-10, 10)  # of outputs: the first has finite roots and logarithms, the second confident softmaxes


class _Inputs(NamedTuple):
    student: Outputs
    teacher: Outputs | None
    labels: Tensor


@torch.no_grad()
def check_rows(objective: Objective, student: Outputs, teacher: Outputs | None, flag: str) -> None:
    """Run an objective on noise like these outputs of 2 rows or more; compare a row's values when other rows change.

    Raises:
        BadInput: a term has another number of values, or relates rows without `relates_rows`.
    """
    for low, high in RANGES:
        draw = partial(_noise, student, teacher, low, high)
        _check(objective, with_seed(0, draw), with_seed(1, draw), flag)


def _check(objective: Objective, first: _Inputs, others: _Inputs, flag: str) -> None:
    name, b = type(objective).__name__, len(first.student.logits)
    terms = _terms(objective, first)
    for term, (values, *_) in terms.items():
        if not isinstance(values, Tensor) or values.shape != (b,):
            given = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise BadInput(flag, name, f"an objective whose term {term} has a value a row, ({b},); it gives {given}")
    for row in range(0 if objective.relates_rows else b):
        changed = _terms(objective, tree_map(partial(_mixed, row), first, others))
        for term, (values, *_) in terms.items():
            if not torch.isclose(changed[term].values[row], values[row], rtol=1e-5, atol=0, equal_nan=True):
                expected = f"an objective whose term {term} has a value a row that depends on no other row"
                raise BadInput(flag, name, f"{expected}, or one with relates_rows = True")


def _terms(objective: Objective, given: _Inputs) -> dict[str, Term]:
    """Terms that are equal in each call, even if the objective keeps state or draws noise."""
    objective = copy.deepcopy(objective).eval()
    return with_seed(0, lambda: objective.terms(objective.adapt(given.student), given.teacher, given.labels))


def _noise(student: Outputs, teacher: Outputs | None, low: float, high: float) -> _Inputs:
    """Outputs between `low` and `high`, and labels (b, ...), some of them equal."""
    labels = torch.randint(min(2, student.logits.shape[-1]), student.logits.shape[:-1])
    student, teacher = tree_map_only(
        Tensor, lambda x: torch.empty(x.shape).uniform_(low, high).to(x), (student, teacher)
    )
    return _Inputs(student, teacher, labels)


def _mixed(row: int, x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """One row of x among the rows of y."""
    return x if x is None or y is None else torch.cat([y[:row], x[row : row + 1], y[row + 1 :]])
