"""A student of a distillation: a net and the objective that it learns by."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.batch import Batch, Mixed, label_mask
from apprentice.errors import BadInput, naming
from apprentice.relations import relate
from lit_modules.nets.layers import layer, run
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.specs import Spec, rebuild
from lit_modules.objectives.base import (
    Objective,
    Term,
    mask_tokens,
    replace_ignored_labels,
    select_view,
    weigh_classes,
    weighted_sum,
)
from lit_modules.objectives.context import StepContext, call
from lit_modules.training.preparation import prepare_net

CE = "cross-entropy"  # of the logits with the labels, whatever the term's name
TEACHER = ""  # no student has this name


class LossInputs(NamedTuple):
    """What a student's losses are computed from, for the rows of a rank or for all rows of the global batch."""

    student: Outputs
    sources: dict[str, Outputs]  # the teacher's by TEACHER, if the objective uses it, and the peers' by their names
    labels: Tensor  # (b,), or (b, T) of tokens
    places: Tensor  # (b,) int64, of the samples in their set
    mixed: tuple[Mixed, ...]  # the second labels of mixed samples; () if they are not mixed


class Losses(NamedTuple):
    """What a step needs of a student's loss."""

    part: Tensor  # this rank's part of the global mean, with its gradient
    total: Tensor  # (b,)
    values: dict[str, Tensor]  # of each term (b,), and as `CE` cross-entropies, one a label


class Student(nn.Module):
    """A net and its objective; the objective's parameters train with the net and are not exported.

    Attributes:
        of_labels: if labels are hidden, the terms that are means over labelled samples, and "loss" if all are.
        per_sequence_terms: the terms with one value for a whole row of tokens; known once it is built.
    """

    def __init__(self, net: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.net, self.objective = net, objective
        self.of_labels: set[str] = set()
        self.per_sequence_terms: set[str] = set()

    def forward(self, inputs: Tensor, *beside: Tensor) -> Outputs:
        """Logits (b, classes), and the features that the objective compares."""
        return self.objective.adapt(self.raw(inputs, *beside))

    def raw(self, inputs: Tensor, *beside: Tensor) -> Outputs:
        """Logits (b, classes), and the features of the layers that the objective reads."""
        return run(self.net, inputs, set(self.objective.student_layers.values()), beside)

    def rows(
        self, name: str, teacher: Outputs | None, students: Mapping[str, Outputs], batch: Batch, context: StepContext
    ) -> LossInputs:
        """What the losses of this student are computed from, given the outputs of all for a rank's rows."""
        sources = {}
        if teacher is not None and self.objective.uses_teacher:
            view = select_view(name, teacher).match_dtype(self.net)
            sources[TEACHER] = call(self.objective.adapt_teacher, view, context=context).widen()
        for peer in self.objective.peers:
            sources[peer] = students[peer].widen().map(Tensor.detach)
        mixed = (batch.mixed,) if isinstance(batch.mixed, Mixed) else ()
        return LossInputs(students[name].widen(), sources, batch.labels, batch.index, mixed)

    def step_losses(
        self, name: str, teacher: Outputs | None, students: Mapping[str, Outputs], batch: Batch, context: StepContext
    ) -> Losses:
        """The losses of this student from the outputs of all for a rank's rows."""
        rows = self.rows(name, teacher, students, batch, context)
        total, values = self.losses(rows, context, batch.label_weight, batch.class_weights)
        part = batch.mean(total)
        if not call(self.objective.trains_all, context=context):
            part = part + zero_loss([self.net], part.device)
        return Losses(part, total, values)

    def losses(
        self,
        rows: LossInputs,
        context: StepContext,
        label_weight: float | Tensor | None,
        class_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses (b,) of a rank's rows, the values (b,) of their terms, and as `CE` cross-entropies, one a label.

        Collective if the objective relates rows; `context` says which rows of the global batch these are.
        """
        terms = partial(self._terms, context=context, label_weight=label_weight, class_weights=class_weights)
        if not self.objective.relates_rows:
            return terms(rows)
        assert context.rows is not None
        return relate(terms, rows, context.rows, context.count)

    def _terms(
        self, rows: LossInputs, context: StepContext, label_weight: float | Tensor | None, class_weights: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The result of `losses` for rows that are related to no others: all of the batch if the objective relates."""
        objective, student, sources, labels = self.objective, rows.student, rows.sources, rows.labels
        counts = None
        if labels.dim() > 1 and label_weight is not None:
            counts = label_mask(labels)
            student, sources = (
                mask_tokens(student, counts),
                {name: mask_tokens(x, counts) for name, x in sources.items()},
            )
        teacher, peers = sources.get(TEACHER), {name: sources[name] for name in objective.peers}
        if objective.relates_rows:
            context = replace(context, rows=torch.arange(len(labels), device=labels.device), count=len(labels))
        context = replace(context, index=rows.places, peers=peers, counted=counts)
        visible = replace_ignored_labels(labels, label_weight)
        terms = _weigh(objective.terms(student, teacher, visible, context), visible, class_weights)
        for mixed in rows.mixed if context.has_labels else ():
            second = _weigh(objective.terms(student, teacher, mixed.labels, context), mixed.labels, class_weights)
            means = {name: mixed.mean(term.values, second[name].values) for name, term in terms.items()}
            terms = {name: term._replace(values=means[name]) for name, term in terms.items()}
        loss, values = weighted_sum(terms, labels, label_weight)
        if objective.relates_rows:
            with torch.no_grad():
                call(objective.after_batch, student, teacher, visible, context=context)
        if (ce := next((term.values for term in terms.values() if term.is_ce), None)) is not None:
            values[CE] = ce
        return loss, values


def make_students(
    pairs: Mapping[str, tuple[nn.Module, Objective] | Sequence[Spec]], teacher: nn.Module, example: Tensor, seed: int
) -> dict[str, Student]:
    """Make students of nets, or of those that objectives put in their place, given example inputs (b, ...).

    BadInput for a name that can't be used, or a parameter of two students.
    """
    students = {}
    for name, pair in pairs.items():
        if hasattr(nn.ModuleDict(), name) or "." in name:
            raise BadInput("variants", name, "a name without dots that is no attribute of torch's ModuleDict")
        net, objective = rebuild(pair, f"students.{name}")
        with naming(f"variants.{name}"):
            net = prepare_net(keyed.with_seed(seed, partial(objective.wrap, net, teacher, example)))
        students[name] = Student(net, objective)
    check_parameters(teacher, students)
    return students


def _weigh(terms: dict[str, Term], labels: Tensor, class_weights: Tensor | None) -> dict[str, Term]:
    """The terms, those that are `class_weighted` by the weights (classes,) of their labels (b,)."""
    if class_weights is None:
        return terms
    weighted = {name: weigh_classes(term.values, labels, class_weights) for name, term in terms.items()}
    return {name: t._replace(values=weighted[name]) if t.class_weighted else t for name, t in terms.items()}


def check_parameters(teacher: nn.Module, students: Mapping[str, Student]) -> None:
    """Raise BadInput if a student shares a parameter with the teacher or another student."""
    owners = dict.fromkeys(teacher.parameters(), "the teacher")
    for name, student in students.items():
        for path, parameter in student.named_parameters():
            if parameter in owners:
                shared = f"its {path.partition('.')[2]} is also a parameter of {owners[parameter]}"
                raise BadInput(f"variants.{name}", type(student.net).__name__, f"a net of its own; {shared}")
        owners |= dict.fromkeys(student.parameters(), f"student {name}")


def zero_loss(modules: Iterable[nn.Module], device: torch.device) -> Tensor:
    """Return zero, with a gradient of zero for every parameter of modules that are idle: DDP waits for each."""
    idle = (p for module in modules for p in module.parameters())
    local = (p for p in idle if type(p) is nn.Parameter and not p.is_meta)  # neither sharded nor on another rank
    zero = torch.zeros((), device=device, requires_grad=True)
    return sum((p.sum().nan_to_num() * 0 for p in local), start=zero)


def choose_layers(teacher: nn.Module, students: Mapping[str, Student]) -> None:
    """Let the objectives settle which layers they read; BadInput if a net has no such layer, or there is no such peer.

    The peers of a student are others that are trained beside it.
    """
    for name, student in students.items():
        objective, flag = student.objective, f"variants.{name}"
        with naming(flag):
            objective.choose(student.net, teacher)
        for option, path in objective.student_layers.items():
            layer(student.net, path, f"{flag}.{option}", objective.needs)
        for option, path in objective.teacher_layers.items():
            layer(teacher, path, f"{flag}.{option}")
        peers = [peer for peer in students if peer != name]
        if unknown := [peer for peer in objective.peers if peer not in peers]:
            listed = ", ".join(peers) or "there are none"
            raise BadInput(f"{flag}.peers", unknown[0], f"students trained beside it: {listed}")


def replicated_buffer_names(module: nn.Module) -> list[str]:
    """Return the names of the buffers of objectives, which are the same on every rank: DDP need not send them."""
    objectives = ((path, part) for path, part in module.named_modules() if isinstance(part, Objective))
    return [f"{path}.{key}" for path, part in objectives for key, _ in part.named_buffers(recurse=False)]
