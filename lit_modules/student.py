"""A student of a distillation: a net and the objective that it learns by, which is tested before training."""

import copy
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from apprentice import keyed
from apprentice.errors import BadInput, reason
from lit_modules.nets import Outputs, globalise, run, typed
from lit_modules.objectives import Objective, Term

RANGES = (0, 1), (-10, 10)  # of outputs: the first has finite roots and logarithms, the second confident softmaxes


class Student(nn.Module):
    """A net and its objective; the objective's parameters train with the net and are not exported."""

    def __init__(self, net: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.net, self.objective = net, objective

    def forward(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features that the objective compares."""
        return self.objective.adapt(self.raw(inputs))

    def raw(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features of the layers that the objective reads."""
        return run(self.net, inputs, set(self.objective.student_layers.values()))

    def build(self, example: Tensor, teacher: Outputs | None, seed: int, flag: str) -> None:
        """Let the objective make its parts, from the seed and the shapes alone, and test it on inputs (b, ...).

        Raises:
            BadInput: the objective refuses the nets' shapes, fails, or gives a loss that trains nothing.
        """
        mode, objective = self.training, self.objective
        outputs = self.eval().raw(typed(self.net, example))
        try:
            keyed.with_seed(seed, partial(objective.build, outputs, teacher))
        except BadInput as fault:
            raise BadInput(f"{flag}.{fault.flag}", fault.value, fault.expected) from None
        globalise(objective.to(outputs.logits.dtype))
        try:
            check_rows(objective, outputs, teacher, flag)
            check_gradient(objective, outputs, teacher, flag)
        except BadInput:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's objective does
            expected = f"an objective for outputs such as these nets'; it says: {reason(error)}"
            raise BadInput(flag, type(objective).__name__, expected) from None
        if objective.relates_rows:
            advice = "its numbers move with the device count"
            rank_zero_warn(f"{flag}: {type(objective).__name__} relates rows that a device has; {advice}")
        self.train(mode)


@torch.no_grad()
def check_rows(objective: Objective, student: Outputs, teacher: Outputs | None, flag: str) -> None:
    """Raise BadInput if, on noise like these outputs of 2 rows or more, a term lacks a value for each row alone.

    A row's values are compared when other rows change, unless the objective declares `relates_rows`.
    """
    name, b = type(objective).__name__, len(student.logits)
    for low, high in RANGES:
        noise = partial(_noise, student, teacher, low, high)
        first, others = keyed.with_seed(0, noise), keyed.with_seed(1, noise)
        terms = _terms(objective, *first)
        for term, (values, *_) in terms.items():
            if not isinstance(values, Tensor) or values.shape != (b,):
                given = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
                raise BadInput(
                    flag, name, f"an objective whose term {term} has a value a row, ({b},); it gives {given}"
                )
        for row in range(0 if objective.relates_rows else b):
            changed = _terms(objective, *tree_map(partial(_mixed, row), first, others))
            for term, (values, *_) in terms.items():
                if not torch.isclose(changed[term].values[row], values[row], rtol=1e-5, atol=0, equal_nan=True):
                    expected = f"an objective whose term {term} has a value a row that depends on no other row"
                    raise BadInput(flag, name, f"{expected}, or one with relates_rows = True")


@torch.enable_grad()
def check_gradient(objective: Objective, student: Outputs, teacher: Outputs | None, flag: str) -> None:
    """Raise BadInput if no term with a weight depends on outputs of the student, such as these."""
    student, teacher, labels = keyed.with_seed(0, partial(_noise, student, teacher, *RANGES[0]))
    student = tree_map_only(Tensor, lambda x: x.requires_grad_().clone() if x.is_floating_point() else x, student)
    terms = _terms(objective, student, teacher, labels)
    if not any(term.weight and term.values.requires_grad for term in terms.values()):
        expected = "an objective whose loss depends on the student's outputs, by a term with a weight"
        raise BadInput(flag, type(objective).__name__, expected)


def _terms(objective: Objective, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
    """Terms that are equal in each call, even if the objective keeps state or draws noise; its parameters are fixed."""
    objective = copy.deepcopy(objective).eval().requires_grad_(False)
    return keyed.with_seed(0, lambda: objective.terms(objective.adapt(student), teacher, labels))


def _noise(student: Outputs, teacher: Outputs | None, low: float, high: float) -> tuple[Outputs, Any, Tensor]:
    """Outputs between `low` and `high`, and labels (b, ...), some of them equal."""
    labels = torch.randint(min(2, student.logits.shape[-1]), student.logits.shape[:-1])
    noise = tree_map_only(Tensor, lambda x: torch.empty(x.shape).uniform_(low, high).to(x), (student, teacher))
    return *noise, labels


def _mixed(row: int, x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """One row of x among the rows of y."""
    return x if x is None or y is None else torch.cat([y[:row], x[row : row + 1], y[row + 1 :]])
