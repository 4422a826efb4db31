"""The base class of objectives: from outputs of student and teacher to named, weighted, per-sample terms."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.batch import label_mask
from apprentice.errors import BadInput
from lit_modules.nets.attention.precision import widen
from lit_modules.nets.ensemble import MEMBERS, SHARES
from lit_modules.nets.layers import DEFAULT_LAYER
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.specs import Recorded
from lit_modules.nets.tokens import TokenGrid, as_maps, token_grid
from lit_modules.objectives.context import NO_STEP, StepContext, takes_context
from lit_modules.objectives.search import Space, space

Grids: TypeAlias = tuple[TokenGrid | None, TokenGrid | None]  # the student's and the teacher's
TEMPERATURES = 1e-18, 1e18  # losses are multiplied by the square


class Term(NamedTuple):
    """A part of a loss: a value a row, (b,), or one a token or text of a row, (b, T), and the weight of their mean."""

    values: Tensor  # (b,) of whole texts: each counts as often as its text has tokens with a label
    weight: float
    is_ce: bool = False  # whether the values are the cross-entropies of the student's logits with the labels
    labelled: bool = False  # whether they need labels: then their mean is over the labelled samples alone
    class_weighted: bool = False  # whether each is multiplied by the weight of its label's class, if there are weights


class Objective(Recorded, nn.Module, ABC):
    """A distillation method: names the layers that it reads, and returns its terms.

    It may have trainable parts, built in `build` and used in `adapt` and `adapt_teacher`: they train with the student,
    in its precision, and are not exported. Its buffers are saved for a resume, and change in `after_batch` alone.

    `build`, `adapt_teacher`, `forward`, `trains_all` and `after_batch` may take one more argument, `context`: the point
    in training as a `StepContext`.

    Attributes:
        uses_teacher: whether it needs the teacher's outputs.
        learns: whether it trains the student, which else stops before the first batch.
        compares: kinds of outputs that it can learn from: see `Task.outputs`.
        student_layers: layers whose outputs it reads from `student.features`, by the options that name them; see
            `lit_modules.nets.layer` for names that every net of the suite has.
        teacher_layers: the same for the teacher.
        needs: which students have these layers, for the message about one that does not.
        relates_rows: whether a row's value depends on other rows, or a buffer changes with them. Then `forward` gets
            the outputs of all rows of the global batch, in order, the same on every rank; `adapt` and `condense` should
            make them small, as they are sent. An objective that does not declare it is refused.
        fewest_related: rows that a global batch needs for relations to have a gradient; smaller batches are refused.
        needs_labels: whether all rows need labels. Otherwise labels may be hidden, and a term may leave rows out.
        peers: names of students whose outputs it reads from `context.peers`.
        search: spaces in which its options are tuned, around the paper's values; other options keep their defaults.
    """

    uses_teacher: bool = True
    learns: bool = True
    compares: frozenset[str] = frozenset({"classes"})
    student_layers: Mapping[str, str] = MappingProxyType({})
    teacher_layers: Mapping[str, str] = MappingProxyType({})
    needs: str = ""
    relates_rows: bool = False
    fewest_related: int = 1
    needs_labels: bool = False
    peers: Sequence[str] = ()
    search: Mapping[str, Space] = space()

    def wrap(self, net: nn.Module, teacher: nn.Module, example: Tensor) -> nn.Module:
        """Return the net to train and export in place of the student's; called first, with example inputs.

        The class of a new net takes `student`, `teacher` and `input_shape`, from which its export is rebuilt.
        """
        return net

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        """Choose the layers to read, if the options leave that open; called before `build`."""

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Build trainable parts and buffers from outputs for a few example inputs; raise BadInput if they don't fit.

        The teacher's outputs have not passed `condense`.
        """

    def parts(self) -> list[nn.Module]:
        """Return the modules that hold all trainable parts, each called separately."""
        return [part for child in self.children() for part in (child if isinstance(child, nn.ModuleList) else [child])]

    def adapt(self, student: Outputs) -> Outputs:
        """Pass the student's features through the trainable parts; return the outputs that `forward` compares.

        This is part of the student's forward, so that `forward` needs no parameters and runs wherever the outputs are.
        The logits do not change.
        """
        return student

    def condense(self, teacher: Outputs) -> Outputs:
        """Reduce the teacher's features, without parameters, to what is compared and may be stored."""
        return teacher

    def adapt_teacher(self, teacher: Outputs) -> Outputs:
        """Pass the condensed features through `teacher_parts`."""
        return teacher

    def teacher_parts(self) -> list[nn.Module]:
        """Return those of `parts` that `adapt_teacher` uses."""
        return []

    def terms(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        """Call `forward` in float32 at least: autocast would compute softmax and differences in bfloat16.

        Where labels are no classes, `forward` gets zeros for them, and its cross-entropies are the context's loss.
        Without labels, terms of them are left out.
        """
        labels = labels if context.has_labels else torch.zeros_like(labels)
        with torch.autocast(labels.device.type, enabled=False):
            student, classes = student.widen(), labels
            if context.loss is not None:
                classes, context = labels.new_zeros(len(labels)).long(), replace(context, labels=labels)
            terms = self.call_forward(student, teacher and teacher.widen(), classes, context)
            if context.loss is not None:  # of labels that are no classes, in the place of the cross-entropies
                loss = context.loss(student.logits, labels)
                terms = {name: term._replace(values=loss) if term.is_ce else term for name, term in terms.items()}
        return terms if context.has_labels else {name: term for name, term in terms.items() if not term.is_ce}

    def call_forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext
    ) -> dict[str, Term]:
        """Call `forward`, with the context if it takes one."""
        arguments = (student, teacher, labels, context) if takes_context(self.forward) else (student, teacher, labels)
        terms: dict[str, Term] = self(*arguments)
        return terms

    def trains_all(self) -> bool:
        """Return whether the terms train the whole net now; else its parameters that are not in `parts` rest."""
        return True

    def phases(self) -> Sequence[float]:
        """Return the progress, 0 to 1, at which each part of training begins whose steps cost the same."""
        return (0.0,)

    @abstractmethod
    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        """Return the terms of b samples. In training all outputs are float32 or float64, also under autocast.

        Args:
            student: logits (b, classes), or (b, T, vocabulary) of tokens, and the student's adapted features.
            teacher: the same of the teacher, condensed and adapted; None if `uses_teacher` is false.
            labels: (b,) int64, or (b, T); 0 where hidden, which a term that is not `labelled` must not notice.
        """

    def after_batch(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> None:
        """Update buffers after a global batch's `forward`, from its arguments; called if the objective relates rows."""


class FeatureObjective(Objective):
    """An objective that compares one layer of the student with one of the teacher.

    Attributes:
        grids: where the tokens of student and teacher stand in the image, for `maps`; set by `choose`.

    Args:
        student_layer: path of the student's layer.
        teacher_layer: path of the teacher's layer.
    """

    grids: Grids = (None, None)

    def __init__(self, student_layer: str = DEFAULT_LAYER, teacher_layer: str = DEFAULT_LAYER) -> None:
        super().__init__()
        self.student_layer, self.teacher_layer = student_layer, teacher_layer
        self.student_layers, self.teacher_layers = {"student_layer": student_layer}, {"teacher_layer": teacher_layer}

    def features(self, student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
        """Return the outputs of both layers, the student's first."""
        assert teacher is not None
        return student.features[self.student_layer], teacher.features[self.teacher_layer]

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        self.grids = token_grid(student), token_grid(teacher)

    def maps(self, student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
        """Return the outputs of both layers, tokens of patches as maps (b, C, H, W)."""
        f_s, f_t = self.features(student, teacher)
        return as_maps(f_s, self.grids[0]), as_maps(f_t, self.grids[1])


def check_map(option: str, path: str, x: Tensor, grid: TokenGrid | None = None) -> None:
    """Raise BadInput if a layer's output, which `as_maps` has seen, is no map (b, C, H, W)."""
    if x.dim() != 4:
        tokens = f" or the tokens of {grid}" if grid else ""
        raise BadInput(option, path, f"a layer that gives maps (C, H, W){tokens}; its output is {tuple(x.shape[1:])}")


def merge_views(raw: Outputs, views: Mapping[str, Outputs]) -> Outputs:
    """Merge the features of several parts' views of outputs: raw ones once, and the parts' own."""
    features, condensed = dict[str, Tensor](), dict[tuple[str, ...], Tensor]()
    for part, view in views.items():
        for path, x in view.features.items():
            if x is raw.features.get(path):
                features[path] = x
            else:
                condensed[part, path] = x
        condensed |= {(part, *path): x for path, x in view.condensed.items()}
    return raw._replace(features=features, condensed=condensed)


def select_view(part: str, outputs: Outputs) -> Outputs:
    """Return the outputs as one part sees them: raw features, and its own by their paths."""
    of_part = {path[1:]: x for path, x in outputs.condensed.items() if path[0] == part}
    features = outputs.features | {path[0]: x for path, x in of_part.items() if len(path) == 1}
    return outputs._replace(features=features, condensed={path: x for path, x in of_part.items() if len(path) > 1})


def condense_teacher(raw: Outputs, objectives: Mapping[str, Objective]) -> Outputs:
    """Reduce a teacher's outputs to what its students need: the features that their objectives condense."""
    views = dict[str, Outputs]()
    for name, objective in objectives.items():
        if objective.uses_teacher:
            paths = [*objective.teacher_layers.values(), *(x for x in (MEMBERS, SHARES) if x in raw.features)]
            views[name] = objective.condense(raw._replace(features={path: raw.features[path] for path in paths}))
    return merge_views(raw, views)


def weighted_sum(
    terms: Mapping[str, Term], labels: Tensor, label_weight: float | Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss (b,), and each term's values (b,), by `average_labelled` for texts and labelled terms."""
    of_tokens = labels.dim() > 1
    values = {
        name: average_labelled(term.values, labels, label_weight if term.labelled or of_tokens else None)
        for name, term in terms.items()
    }
    total = sum((values[name] * term.weight for name, term in terms.items()), start=torch.zeros(()))
    return total, values


def average_labelled(values: Tensor, labels: Tensor, label_weight: float | Tensor | None) -> Tensor:
    """Return (b,) values whose mean over a global batch is that over its labels that count (see `Batch.label_weight`).

    Values are (b,) or, for each token of texts, (b, T); labels (b,) or (b, T). Without such labels the mean is 0.
    """
    if label_weight is None:
        return values.mean(1) if values.dim() > 1 else values
    counts = label_mask(labels)
    of_texts = values.dim() < counts.dim()
    if isinstance(label_weight, Tensor):  # 0 where a label does not count
        weights = label_weight.to(values.dtype)
        values = values * (weights.mean(1) if of_texts else weights)
    else:
        values = values * label_weight
        values = values * counts.to(values.dtype).mean(1) if of_texts else values
    values = values.where(counts.any(1) if of_texts else counts, 0.0)
    return values.mean(1) if values.dim() > 1 else values


def weigh_classes(values: Tensor, labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """Return values (b,) times the weights (classes,) of their labels (b,); see `Batch.class_weights`."""
    return values if class_weights is None else values * class_weights[labels].to(values.dtype)


def replace_ignored_labels(labels: Tensor, label_weight: float | Tensor | None) -> Tensor:
    """Return the labels, 0 where they do not count."""
    return labels if label_weight is None else labels.where(label_mask(labels), 0)


def mask_tokens(outputs: Outputs, counts: Tensor) -> Outputs:
    """Set logits and features (b, T, ...) to zero for tokens that do not count, (b, T) bool."""

    def mask(x: Tensor) -> Tensor:
        if x.shape[:2] != counts.shape:
            return x
        return x.where(counts.view(*counts.shape, *[1] * (x.dim() - 2)), x.new_zeros(()))

    return outputs.map(mask)


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return (b, ...), cross-entropies of logits (b, ..., classes) with labels (b, ...); 0 where a label is -100."""
    z, y = widen(logits).flatten(0, -2), labels.flatten()
    return F.cross_entropy(z, y, reduction="none", label_smoothing=label_smoothing).view_as(labels)


def ce_term(student: Outputs, labels: Tensor, weight: float) -> Term:
    """Return the cross-entropy of the student's logits with the labels as a term."""
    return Term(cross_entropy(student.logits, labels), weight, is_ce=True, labelled=True, class_weighted=True)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Compute (b, ...), KL(p || q) = sum of p (log p - log q), of log-probabilities (b, ..., classes); 0 log 0 is 0."""
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def check_temperature(value: float) -> float:
    """Return the value; raise BadInput unless it is above zero and float32 holds its square."""
    low, high = TEMPERATURES
    if not low <= value <= high:
        raise BadInput("temperature", value, f"a number above 0, from {low:g} to {high:g}")
    return value


def positive(name: str, value: float) -> float:
    """Return the value; raise BadInput unless it is above zero."""
    if not 0 < value < float("inf"):
        raise BadInput(name, value, "a number above 0")
    return value


def weight(name: str, value: float) -> float:
    """Return the value; raise BadInput unless it is zero or more."""
    if not 0 <= value < float("inf"):
        raise BadInput(name, value, "a number of 0 or more")
    return value
