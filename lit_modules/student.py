"""A student of a distillation: a net and the objective that it learns by, which is tested before training."""

from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.batch import Batch, Mixed, label_mask
from apprentice.errors import BadInput, naming, reason
from apprentice.relations import relate
from lit_modules.nets import Outputs, globalise, layer, run
from lit_modules.nets.token_head import TokenHead, is_whole, run_before_head
from lit_modules.objective_checks import check_finite, check_gradient, check_labels, check_rows
from lit_modules.objectives import Objective, Place
from lit_modules.objectives.base import (
    Term,
    condense_teacher,
    fill_uncounted,
    mask_tokens,
    select_view,
    weigh_classes,
    weighted_sum,
)

CE = "cross-entropy"  # of the logits with the labels, whatever the term's name
LAST_EPOCH = 1e6  # objectives are tested as at the end of training, when weights that grow have their full size
TEACHER = ""  # no student has this name


class Rows(NamedTuple):
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
        token_head: of a language model whose losses are computed in chunks, the head that is left out in training.
        score_head: the head that is left out while it is scored (`is_scored`).
        of_rows: the terms with one value for a whole row of tokens; known after `build`.
    """

    def __init__(self, net: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.net, self.objective = net, objective
        self.of_labels: set[str] = set()
        self.token_head: TokenHead | None = None
        self.score_head: TokenHead | None = None
        self.is_scored = False
        self.of_rows: set[str] = set()

    def forward(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features that the objective compares."""
        if self.is_scored and self.score_head is not None and is_whole(self.net, self.score_head):
            return run_before_head(self.net, self.score_head, inputs)
        return self.objective.adapt(self.raw(inputs))

    def raw(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features of the layers that the objective reads."""
        if self.training and self.token_head is not None and is_whole(self.net, self.token_head):
            return run_before_head(self.net, self.token_head, inputs)
        return run(self.net, inputs, set(self.objective.student_layers.values()))

    def rows(self, name: str, teacher: Outputs | None, students: Mapping[str, Outputs], batch: Batch) -> Rows:
        """What the losses of this student are computed from, given the outputs of all for a rank's rows."""
        sources = {}
        if teacher is not None and self.objective.uses_teacher:
            view = select_view(name, teacher).match_dtype(self.net)
            sources[TEACHER] = self.objective.adapt_teacher(view).widen()
        for peer in self.objective.peers:
            sources[peer] = students[peer].widen().map(Tensor.detach)
        mixed = (batch.mixed,) if isinstance(batch.mixed, Mixed) else ()
        return Rows(students[name].widen(), sources, batch.labels, batch.index, mixed)

    def step_losses(
        self, name: str, teacher: Outputs | None, students: Mapping[str, Outputs], batch: Batch, place: Place
    ) -> Losses:
        """The losses of this student from the outputs of all for a rank's rows."""
        if batch.starts is not None:
            self.check_packed(name)
        self.objective.place = place
        rows = self.rows(name, teacher, students, batch)
        total, values = self.losses(rows, place, batch.label_weight, batch.class_weights)
        part = batch.mean(total)
        if not self.objective.trains_all():
            part = part + zero_of([self.net], part.device)
        return Losses(part, total, values)

    def check_packed(self, name: str) -> None:
        """Raise BadInput if the objective compares rows, which hold several texts each, and not their tokens."""
        if self.objective.teacher_writes:
            raise BadInput(f"variants.{name}", type(self.objective).__name__, "--data.pack false: a row has one prompt")
        if share := self.objective.on_policy:
            raise BadInput(f"variants.{name}.on_policy", share, "0, or --data.pack false: a row has one prompt")
        if self.of_rows or self.objective.relates_rows or self.objective.relates_tokens:
            expected = "an objective that compares tokens one by one, or --data.pack false: it compares whole texts"
            raise BadInput(f"variants.{name}", type(self.objective).__name__, expected)

    def losses(
        self, rows: Rows, place: Place, label_weight: float | Tensor | None, class_weights: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses (b,) of a rank's rows, the values (b,) of their terms, and as `CE` cross-entropies, one a label.

        Collective if the objective relates rows; `place` says which rows of the global batch these are.
        """
        terms = partial(self._terms, place=place, label_weight=label_weight, class_weights=class_weights)
        if not self.objective.relates_rows:
            return terms(rows)
        assert place.rows is not None
        return relate(terms, rows, place.rows, place.count)

    def _terms(
        self, rows: Rows, place: Place, label_weight: float | Tensor | None, class_weights: Tensor | None
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
            place = place._replace(rows=torch.arange(len(labels), device=labels.device), count=len(labels))
        objective.place = place._replace(index=rows.places, peers=peers, counted=counts)
        visible = fill_uncounted(labels, label_weight)
        terms = _weigh(objective.terms(student, teacher, visible), visible, class_weights)
        for mixed in rows.mixed:
            second = _weigh(objective.terms(student, teacher, mixed.labels), mixed.labels, class_weights)
            means = {name: mixed.mean(term.values, second[name].values) for name, term in terms.items()}
            terms = {name: term._replace(values=means[name]) for name, term in terms.items()}
        loss, values = weighted_sum(terms, labels, label_weight)
        if objective.relates_rows:
            with torch.no_grad():
                objective.after_batch(student, teacher, visible)
        if (ce := next((term.values for term in terms.values() if term.is_ce), None)) is not None:
            values[CE] = ce
        return loss, values

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

        `teacher` are its outputs for these, and `peers` those of the students that the objective names. `flag` named
        the objective; `samples` is the size of the training set, if batches name their samples, and `labelled` whether
        all have labels.

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
        check_features(outputs, objective.student_layers, flag)
        with naming(flag):
            keyed.with_seed(seed, partial(objective.build, outputs, teacher))
        globalise(objective.to(outputs.logits.dtype))
        objective.place = objective.place._replace(epoch=LAST_EPOCH, progress=1.0)
        try:
            condensed = teacher and condense_teacher(teacher, {"": objective})
            self.of_rows = check_rows(objective, outputs, condensed, flag)
            check_gradient(objective, outputs, condensed, flag)
            if condensed is not None and not condensed.logits.isfinite().all():
                check_finite(objective, outputs, condensed, flag)
            if not labelled:
                self.of_labels = check_labels(objective, outputs, condensed, flag)
        except BadInput:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a user's objective does
            expected = f"an objective for outputs such as these nets'; it says: {reason(error)}"
            raise BadInput(flag, type(objective).__name__, expected) from None
        self.train(mode)


def check_features(outputs: Outputs, layers: Mapping[str, str], flag: str) -> None:
    """Raise BadInput if a layer that an objective reads has not run, or gives no tensor, such as a tuple."""
    for option, path in layers.items():
        output = outputs.features.get(path)
        if not isinstance(output, Tensor):
            what = "it takes no part in a forward" if output is None else f"its output is a {type(output).__name__}"
            raise BadInput(f"{flag}.{option}", path, f"a layer that gives a tensor; {what}")


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


def zero_of(students: Iterable[nn.Module], device: torch.device) -> Tensor:
    """Return zero, with a gradient of zero for every parameter of students that are idle: DDP waits for each."""
    idle = (p for student in students for p in student.parameters())
    here = (p for p in idle if type(p) is nn.Parameter and not p.is_meta)  # neither sharded nor on another rank
    zero = torch.zeros((), device=device, requires_grad=True)
    return sum((p.sum().nan_to_num() * 0 for p in here), start=zero)


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


def list_kept(module: nn.Module) -> list[str]:
    """Return the names of the buffers of objectives, which are the same on every rank: DDP need not send them."""
    objectives = ((path, part) for path, part in module.named_modules() if isinstance(part, Objective))
    return [f"{path}.{key}" for path, part in objectives for key, _ in part.named_buffers(recurse=False)]
