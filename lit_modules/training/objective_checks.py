"""Before any training objectives make their parts, and are tested on noise: what terms depend on, what they train."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput, naming, reason
from lit_modules.nets.batch_norm import globalise
from lit_modules.nets.outputs import UNLABELLED, Outputs
from lit_modules.nets.stored import NoTeacher
from lit_modules.objectives.base import Objective, Term, condense_teacher, select_view
from lit_modules.objectives.context import StepContext, call

if TYPE_CHECKING:
    from lit_modules.training.student import Student

Sample = tuple[Outputs, Outputs | None, Tensor]  # what a student and perhaps a teacher give, and labels
LAST_EPOCH = 1e6  # objectives are tested as at the end of training, when weights that grow have their full size
RANGES = (0, 1), (-10, 10)  # of outputs: the first has finite roots and logarithms, the second confident softmaxes


@torch.no_grad()
def build_students(
    students: Mapping[str, "Student"], teacher: nn.Module, ask: Callable[[], Outputs], example: Tensor, seed: int,
    kind: str, samples: int | None, labelled: bool,
) -> None:  # fmt: skip
    """Let the objectives make their parts, given inputs (b, ...), for which `ask` returns the teacher's outputs.

    `kind` is that of the nets' outputs, by `Task.outputs`. BadInput for an objective that does not compare such, or
    needs a teacher where there is none; see `build_student`.
    """
    for name, student in students.items():
        if kind not in student.objective.compares:
            learns = " and ".join(sorted(student.objective.compares))
            expected = f"a method that compares {kind}; it learns from {learns}"
            raise BadInput(f"variants.{name}", type(student.objective).__name__, expected)
    taught = [name for name, student in students.items() if student.objective.uses_teacher]
    if taught and isinstance(teacher, NoTeacher):
        raise BadInput("teacher", "None", f"a teacher, from which {taught[0]} learns")
    teacher_outputs = ask() if taught else None
    for name, student in students.items():
        peers = {peer: students[peer].eval().raw(example) for peer in student.objective.peers}
        flag = f"variants.{name}"
        if teacher_outputs is not None:
            check_features(teacher_outputs, student.objective.teacher_layers, flag)
        outputs = teacher_outputs and teacher_outputs.match_dtype(student.net)
        context = StepContext(samples=samples, peers=peers, has_labels=kind not in UNLABELLED)
        build_student(student, example, outputs, seed, flag, labelled, context)


def build_student(
    student: "Student",
    example: Tensor,
    teacher: Outputs | None,
    seed: int,
    flag: str,
    labelled: bool,
    context: StepContext,
) -> None:
    """Let a student's objective make its parts, from the seed and the shapes alone, and test it on inputs (b, ...).

    `teacher` are its outputs for these. `flag` named the objective, `labelled` says whether all samples have labels,
    and `context` has the size of the training set, if batches name their samples, and the outputs of the peers.

    Raises:
        BadInput: the objective refuses the nets' shapes, fails, or gives a loss that trains nothing; with hidden
            labels, it needs all, or a term depends on labels and does not say so.
    """
    mode, objective = student.training, student.objective
    if objective.needs_labels and not labelled:
        raise BadInput(flag, type(objective).__name__, "labels of all training samples; some are hidden")
    rows = torch.arange(len(example))
    context = replace(context, index=rows, rows=rows, count=len(rows))
    outputs = student.eval().raw(example)
    check_features(outputs, objective.student_layers, flag)
    with naming(flag):
        keyed.with_seed(seed, partial(call, objective.build, outputs, teacher, context=context))
    globalise(objective.to(outputs.logits.dtype))
    context = replace(context, epoch=LAST_EPOCH, progress=1.0)
    try:
        condensed = teacher and condense_teacher(teacher, {"": objective})
        student.per_sequence_terms = check_rows(objective, outputs, condensed, flag, context)
        check_gradient(objective, outputs, condensed, flag, context)
        if condensed is not None and not condensed.logits.isfinite().all():
            check_finite(objective, outputs, condensed, flag, context)
        if not labelled:
            student.of_labels = check_labels(objective, outputs, condensed, flag, context)
    except BadInput:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's objective does
        expected = f"an objective for outputs such as these nets'; it says: {reason(error)}"
        raise BadInput(flag, type(objective).__name__, expected) from None
    student.train(mode)


def check_features(outputs: Outputs, layers: Mapping[str, str], flag: str) -> None:
    """Raise BadInput if a layer that an objective reads has not run, or gives no tensor, such as a tuple."""
    for option, path in layers.items():
        output = outputs.features.get(path)
        if not isinstance(output, Tensor):
            what = "it takes no part in a forward" if output is None else f"its output is a {type(output).__name__}"
            raise BadInput(f"{flag}.{option}", path, f"a layer that gives a tensor; {what}")


@torch.no_grad()
def check_rows(
    objective: Objective, student: Outputs, teacher: Outputs | None, flag: str, context: StepContext
) -> set[str]:
    """Raise BadInput if, on noise like these outputs of 2 rows or more, a term lacks a value for each row alone.

    A row's values are compared when other rows change, unless the objective declares `relates_rows`. Return the terms
    with one value for a whole row of tokens.
    """
    name, b = type(objective).__name__, len(student.logits)
    for low, high in RANGES:
        noise = partial(_noise, student, teacher, low, high)
        sample, others = keyed.with_seed(0, noise), keyed.with_seed(1, noise)
        terms = _repeatable_terms(objective, *sample, context)
        for term, (values, *_) in terms.items():
            if not isinstance(values, Tensor) or values.shape not in ((b,), student.logits.shape[:-1]):
                shape = tuple(values.shape) if isinstance(values, Tensor) else f"a {type(values).__name__}"
                expected = f"an objective whose term {term} has a value a row, ({b},); it gives {shape}"
                raise BadInput(flag, name, expected)
        for row in range(0 if objective.relates_rows else b):
            changed = _repeatable_terms(objective, *_with_row(row, sample, others), context)
            for term, (values, *_) in terms.items():
                if not changed[term].values[row].allclose(values[row], rtol=1e-5, atol=0, equal_nan=True):
                    expected = f"an objective whose term {term} has a value a row that depends on no other row"
                    raise BadInput(flag, name, f"{expected}, or one with relates_rows = True")
    return {term for term, (values, *_) in terms.items() if values.dim() < student.logits.dim() - 1}


@torch.enable_grad()
def check_gradient(
    objective: Objective, student: Outputs, teacher: Outputs | None, flag: str, context: StepContext
) -> None:
    """Raise BadInput if no term with a weight depends on outputs of the student, such as these."""
    student, teacher, labels = keyed.with_seed(0, partial(_noise, student, teacher, *RANGES[0]))
    student = student.map(lambda x: x.requires_grad_().clone() if x.is_floating_point() else x)
    terms = _repeatable_terms(objective, student, teacher, labels, context)
    if not any(term.weight and term.values.requires_grad for term in terms.values()):
        expected = "an objective whose loss depends on the student's outputs, by a term with a weight"
        raise BadInput(flag, type(objective).__name__, expected)


@torch.enable_grad()
def check_finite(objective: Objective, student: Outputs, teacher: Outputs, flag: str, context: StepContext) -> None:
    """Raise BadInput if the loss, or its gradient, is not finite for these outputs, such as of a teacher with -inf."""
    objective = copy.deepcopy(objective)
    student = student.map(lambda x: x.detach().requires_grad_(x.is_floating_point()))
    labels = torch.zeros(student.logits.shape[:-1], dtype=torch.int64)
    adapted = call(objective.adapt_teacher, select_view("", teacher), context=context)
    terms = objective.terms(objective.adapt(student), adapted, labels, context)
    loss = sum((term.values.sum() * term.weight for term in terms.values()), start=torch.zeros(()))
    leaves = [x for x in (*student.tensors(), *objective.parameters()) if x.requires_grad]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    if not all(x.isfinite().all() for x in (loss, *gradients) if x is not None):
        expected = "a teacher with finite logits; for zeros it gives others, with which this loss is not finite"
        raise BadInput(flag, type(objective).__name__, expected)


@torch.no_grad()
def check_labels(
    objective: Objective, student: Outputs, teacher: Outputs | None, flag: str, context: StepContext
) -> set[str]:
    """The names of `labelled` terms, and "loss" if all are; BadInput if another one depends on labels."""
    student, teacher, labels = keyed.with_seed(0, partial(_noise, student, teacher, *RANGES[1]))
    terms, others = (
        _repeatable_terms(objective, student, teacher, labels, context),
        _repeatable_terms(objective, student, teacher, 1 - labels, context),
    )
    for name, term in terms.items():
        if not term.labelled and not torch.equal(term.values, others[name].values):
            expected = f"an objective whose term {name} needs no label, as some are hidden, or is a labelled one"
            raise BadInput(flag, type(objective).__name__, expected)
    labelled = {name for name, term in terms.items() if term.labelled}
    return labelled | ({"loss"} if len(labelled) == len(terms) else set())


def _repeatable_terms(
    objective: Objective, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext
) -> dict[str, Term]:
    """Terms that are equal in each call, even if the objective keeps state or draws noise; its parameters are fixed."""
    objective = copy.deepcopy(objective).eval().requires_grad_(False)
    adapted = teacher and call(objective.adapt_teacher, select_view("", teacher), context=context)
    return keyed.with_seed(0, lambda: objective.terms(objective.adapt(student), adapted, labels, context))


def _noise(student: Outputs, teacher: Outputs | None, low: float, high: float) -> Sample:
    """Outputs between `low` and `high`, and labels (b, ...), some of them equal."""
    labels = torch.randint(min(2, student.logits.shape[-1]), student.logits.shape[:-1])

    def draw(x: Tensor) -> Tensor:
        return torch.empty(x.shape).uniform_(low, high).to(x)

    return student.map(draw), teacher and teacher.map(draw), labels


def _with_row(row: int, sample: Sample, others: Sample) -> Sample:
    """One row of a sample among the rows of others."""

    def mix(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([y[:row], x[row : row + 1], y[row + 1 :]])

    def mix_outputs(x: Outputs, y: Outputs) -> Outputs:
        of_others = iter(y.tensors())
        return x.map(lambda z: mix(z, next(of_others)))

    teacher = None if sample[1] is None or others[1] is None else mix_outputs(sample[1], others[1])
    return mix_outputs(sample[0], others[0]), teacher, mix(sample[2], others[2])
