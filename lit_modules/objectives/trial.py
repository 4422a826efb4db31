"""What an objective gives is tried before anything trains: a value for each row, of that row alone."""

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

RANGES = (0, 1), (-10, 10)  # of outputs: one has finite roots and logarithms, the other confident softmaxes


class _Given(NamedTuple):
    """What an objective is called with."""

    student: Outputs
    teacher: Outputs | None
    labels: Tensor


@torch.no_grad()
def check_rows(objective: Objective, student: Outputs, teacher: Outputs | None, flag: str) -> None:
    """Try an objective on noise instead of what two nets gave.

    Args:
        objective: built for the pair.
        student: outputs for b rows, at least 2, whose shapes and types the noise has.
        teacher: the same of the teacher; None where it is not asked.
        flag: where the objective was chosen.

    Raises:
        BadInput: a term has not one value a row, or relates rows though the objective does not say so.
    """
    for low, high in RANGES:
        draw = partial(_noise, student, teacher, low, high)
        _check(objective, with_seed(0, draw), with_seed(1, draw), flag)


def _check(objective: Objective, first: _Given, others: _Given, flag: str) -> None:
    name, b = type(objective).__name__, len(first.student.logits)
    terms = _tried(objective, first)
    for term, (values, *_) in terms.items():
        if not isinstance(values, Tensor) or values.shape != (b,):
            given = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise BadInput(flag, name, f"an objective whose term {term} has a value a row, ({b},); it gives {given}")
    for row in range(0 if objective.relates_rows else b):
        changed = _tried(objective, tree_map(partial(_mixed, row), first, others))
        for term, (values, *_) in terms.items():
            if not torch.isclose(changed[term].values[row], values[row], rtol=1e-5, atol=0, equal_nan=True):
                expected = f"an objective whose term {term} has a value a row that depends on no other row"
                raise BadInput(flag, name, f"{expected}, or one with relates_rows = True")


def _tried(objective: Objective, given: _Given) -> dict[str, Term]:
    """The same for each call, though an objective may count its calls, keep what it has seen, or draw noise."""
    objective = copy.deepcopy(objective).eval()
    return with_seed(0, lambda: objective.terms(objective.adapt(given.student), given.teacher, given.labels))


def _noise(student: Outputs, teacher: Outputs | None, low: float, high: float) -> _Given:
    """Outputs from `low` to `high`, and labels (b, ...) of which some are equal."""
    labels = torch.randint(min(2, student.logits.shape[-1]), student.logits.shape[:-1])
    student, teacher = tree_map_only(
        Tensor, lambda x: torch.empty(x.shape).uniform_(low, high).to(x), (student, teacher)
    )
    return _Given(student, teacher, labels)


def _mixed(row: int, x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """One row of x among those of y."""
    return x if x is None or y is None else torch.cat([y[:row], x[row : row + 1], y[row + 1 :]])
