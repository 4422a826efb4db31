"""A student of a distillation: a net and the objective that it learns by, which is tested before training."""

import copy
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput, naming, reason
from apprentice.private import tree_map, tree_map_only
from lit_modules.nets import Outputs, globalise, run
from lit_modules.objectives import Objective, Place, Term
from lit_modules.objectives.base import condensed, viewed

LAST_EPOCH = 1e6  # objectives are tested as at the end of training, when weights that grow have their full size
RANGES = (0, 1), (-10, 10)  # of outputs: the first has finite roots and logarithms, the second confident softmaxes


class Student(nn.Module):
    """A net and its objective; the objective's parameters train with the net and are not exported.

    Attributes:
        of_labels: if labels are hidden, the terms that are means over labelled samples, and "loss" if all are.
    """

    def __init__(self, net: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.net, self.objective = net, objective
        self.of_labels: set[str] = set()

    def forward(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features that the objective compares."""
        return self.objective.adapt(self.raw(inputs))

    def raw(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features of the layers that the objective reads."""
        return run(self.net, inputs, set(self.objective.student_layers.values()))

    def build(
        self,
        example: Tensor,
        teacher: Outputs | None,
        seed: int,
        flag: str,
        samples: int | None = None,
        labelled: bool = True,
        peers: Mapping[str, Outputs] = MappingProxyType({}),
    ) -> None:
        """Let the objective make its parts, from the seed and the shapes alone, and test it on inputs (b, ...).

        Args:
            example: inputs, such as zeros.
            teacher: its outputs for them.
            seed: of the parts' first weights.
            flag: that named the objective.
            samples: in the training set, if batches name their samples.
            labelled: whether all of these have labels.
            peers: outputs of the students by whose names the objective asks for them.

        Raises:
            BadInput: the objective refuses the nets' shapes, fails, or gives a loss that trains nothing; with hidden
                labels, it needs all, or a term depends on labels and does not say so.
        """
        mode, objective = self.training, self.objective
        if objective.needs_labels and not labelled:
            raise BadInput(flag, type(objective).__name__, "labels of all training samples; some are hidden")
        rows = torch.arange(len(example))
        objective.place = Place(index=rows, rows=rows, count=len(rows), samples=samples, peers=peers)
        outputs = self.eval().raw(example)
        with naming(flag):
            keyed.with_seed(seed, partial(objective.build, outputs, teacher))
        globalise(objective.to(outputs.logits.dtype))
        objective.place = objective.place._replace(epoch=LAST_EPOCH, progress=1.0)
        try:
            known = teacher and condensed(teacher, {"": objective})
            check_rows(objective, outputs, known, flag)
            check_gradient(objective, outputs, known, flag)
            if known is not None and not known.logits.isfinite().all():
                check_finite(objective, outputs, known, flag)
            if not labelled:
                self.of_labels = check_labels(objective, outputs, known, flag)
        except BadInput:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's objective does
            expected = f"an objective for outputs such as these nets'; it says: {reason(error)}"
            raise BadInput(flag, type(objective).__name__, expected) from None
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
            if not isinstance(values, Tensor) or values.shape not in ((b,), student.logits.shape[:-1]):
                given = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
                raise BadInput(
                    flag, name, f"an objective whose term {term} has a value a row, ({b},); it gives {given}"
                )
        for row in range(0 if objective.relates_rows else b):
            changed = _terms(objective, *tree_map(partial(_mixed, row), first, others))
            for term, (values, *_) in terms.items():
                if not changed[term].values[row].allclose(values[row], rtol=1e-5, atol=0, equal_nan=True):
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


@torch.enable_grad()
def check_finite(objective: Objective, student: Outputs, teacher: Outputs, flag: str) -> None:
    """Raise BadInput if the loss, or its gradient, is not finite for these outputs, such as of a teacher with -inf."""
    objective = copy.deepcopy(objective)
    student = tree_map_only(Tensor, lambda x: x.detach().requires_grad_(x.is_floating_point()), student)
    labels = torch.zeros(student.logits.shape[:-1], dtype=torch.int64)
    terms = objective.terms(objective.adapt(student), objective.adapt_teacher(viewed("", teacher)), labels)
    loss = sum((term.values.sum() * term.weight for term in terms.values()), start=torch.zeros(()))
    leaves = [x for x in (student.logits, *student.features.values(), *objective.parameters()) if x.requires_grad]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    if not all(x.isfinite().all() for x in (loss, *gradients) if x is not None):
        expected = "a teacher with finite logits; for zeros it gives others, with which this loss is not finite"
        raise BadInput(flag, type(objective).__name__, expected)


@torch.no_grad()
def check_labels(objective: Objective, student: Outputs, teacher: Outputs | None, flag: str) -> set[str]:
    """The names of `labelled` terms, and "loss" if all are; BadInput if another one depends on labels."""
    student, teacher, labels = keyed.with_seed(0, partial(_noise, student, teacher, *RANGES[1]))
    terms, others = _terms(objective, student, teacher, labels), _terms(objective, student, teacher, 1 - labels)
    for name, term in terms.items():
        if not term.labelled and not torch.equal(term.values, others[name].values):
            expected = f"an objective whose term {name} needs no label, as some are hidden, or is a labelled one"
            raise BadInput(flag, type(objective).__name__, expected)
    labelled = {name for name, term in terms.items() if term.labelled}
    return labelled | ({"loss"} if len(labelled) == len(terms) else set())


def _terms(objective: Objective, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
    """Terms that are equal in each call, even if the objective keeps state or draws noise; its parameters are fixed."""
    objective = copy.deepcopy(objective).eval().requires_grad_(False)
    known = teacher and objective.adapt_teacher(viewed("", teacher))
    return keyed.with_seed(0, lambda: objective.terms(objective.adapt(student), known, labels))


def _noise(student: Outputs, teacher: Outputs | None, low: float, high: float) -> tuple[Outputs, Any, Tensor]:
    """Outputs between `low` and `high`, and labels (b, ...), some of them equal."""
    labels = torch.randint(min(2, student.logits.shape[-1]), student.logits.shape[:-1])
    noise = tree_map_only(Tensor, lambda x: torch.empty(x.shape).uniform_(low, high).to(x), (student, teacher))
    return *noise, labels


def _mixed(row: int, x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """One row of x among the rows of y."""
    return x if x is None or y is None else torch.cat([y[:row], x[row : row + 1], y[row + 1 :]])
