"""The base of objectives: functions from outputs of student and teacher to named, weighted, per-sample terms."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.batch import label_mask
from apprentice.errors import BadInput
from lit_modules.nets.base import Outputs
from lit_modules.nets.ensemble import MEMBERS
from lit_modules.nets.layers import DEFAULT_LAYER
from lit_modules.nets.recorded import Recorded
from lit_modules.objectives.search import Space, space

OWN = ">"  # between the name of a part and the path of a feature that it made; no path contains it
TEMPERATURES = 1e-18, 1e18  # losses are multiplied by the square


class Term(NamedTuple):
    """One part of a loss: a value a row, (b,), or of texts a value a token, (b, T), and the weight of their mean."""

    values: Tensor  # of a text as a whole, (b,), each counts as often as the text has tokens with a label
    weight: float
    is_ce: bool = False  # whether the values are the cross-entropies of the student's logits with the labels
    labelled: bool = False  # whether they need labels: then the mean is over the labelled samples alone


class Place(NamedTuple):
    """Where in the training an objective is asked for its terms, and about which rows."""

    step: int = 0  # batches that training has completed
    epoch: float = 0.0  # the same in epochs, with fractions
    progress: float = 0.0  # the same as a fraction of the whole training, which changes where a run grows by epochs
    index: Tensor | None = None  # type: ignore[assignment]  # (b,) int64, the samples' places in their set
    rows: Tensor | None = None  # (b,) int64, the samples' rows in the global batch
    count: int = 0  # type: ignore[assignment]  # rows in the global batch
    samples: int | None = None  # in the training set, if `index` is known; also in `build`
    peers: Mapping[str, Outputs] = MappingProxyType({})  # outputs of the students in `peers`, without gradients
    counted: Tensor | None = None  # (b, T) bool, which tokens count; None if all do


class Objective(Recorded, nn.Module, ABC):
    """A distillation method: names the layers that it reads, and returns its terms.

    It may own trainable parts, made in `build` and used in `adapt` and `adapt_teacher`: they train with the student, in
    its precision, and are not exported. Its buffers are saved for a resume, and change in `after_batch` alone.

    Attributes:
        uses_teacher: whether it needs the teacher's outputs.
        student_layers: paths of layers whose outputs it reads from `student.features`, by the options that name them;
            see `lit_modules.nets.layer` for names that every net of ours has.
        teacher_layers: the same for the teacher.
        needs: which students have these layers, for the message about one that does not.
        relates_rows: whether a row's value depends on other rows, or a buffer changes with them. Then `forward` gets
            the outputs of all rows of the global batch, in order, the same on every rank; `adapt` and `condense` make
            them small, as they are sent. Refused if not declared.
        fewest_related: rows of a global batch of which relations have a gradient; a run of smaller batches is refused.
        needs_labels: whether it can't do with hidden labels, such as by leaving their rows out of a term.
        peers: names of students whose outputs it reads from `place.peers`.
        search: spaces in which its options are tuned, from the paper's values; an option that is not there keeps its
            default.
        place: where training is, set before each call of `forward`, `build` and `after_batch`.
    """

    uses_teacher: bool = True
    student_layers: Mapping[str, str] = MappingProxyType({})
    teacher_layers: Mapping[str, str] = MappingProxyType({})
    needs: str = ""
    relates_rows: bool = False
    fewest_related: int = 1
    needs_labels: bool = False
    peers: Sequence[str] = ()
    search: Mapping[str, Space] = space()
    place: Place = Place()

    def wrap(self, net: nn.Module, teacher: nn.Module, example: Tensor) -> nn.Module:
        """The net to train and export in place of the student's, given example inputs; called before all else.

        A new one's class takes `student`, `teacher` and `input_shape`, so that its export can be rebuilt from theirs.
        """
        return net

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        """Settle which layers are read, given both nets, if the options leave it open; called before `build`."""

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Make trainable parts and buffers for the nets, or refuse these, given outputs for a few example inputs.

        The teacher's outputs have not passed `condense`.
        """

    def parts(self) -> list[nn.Module]:
        """The modules that hold all trainable parts, each called separately."""
        return list(self.children())

    def adapt(self, student: Outputs) -> Outputs:
        """The student's outputs with features passed through the trainable parts, which `forward` compares.

        Part of the student's forward, so that `forward` needs no parameters and can run wherever the outputs are. The
        logits do not change.
        """
        return student

    def condense(self, teacher: Outputs) -> Outputs:
        """The teacher's outputs with features reduced, without parameters, to what is compared and may be stored."""
        return teacher

    def adapt_teacher(self, teacher: Outputs) -> Outputs:
        """The condensed outputs with features passed through `teacher_parts`."""
        return teacher

    def teacher_parts(self) -> list[nn.Module]:
        """Those of `parts` that are used in `adapt_teacher`."""
        return []

    def terms(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        """The terms of `forward`, in float32 at least: autocast would compute softmax and differences in bfloat16."""
        with torch.autocast(labels.device.type, enabled=False):
            return self(wide(student), teacher and wide(teacher), labels)

    @abstractmethod
    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        """The terms of b samples. In training all outputs are float32 or float64, also under autocast.

        Args:
            student: logits (b, classes), or (b, T, vocabulary) of tokens, and the student's adapted features.
            teacher: the same of the teacher, condensed and adapted; None if `uses_teacher` is false.
            labels: (b,) int64, or (b, T); 0 where hidden, which a term that is not `labelled` must not notice.
        """

    def after_batch(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> None:
        """Change buffers after a global batch's `forward`, given its arguments; only if the objective relates rows."""


class FeatureObjective(Objective):
    """An objective that compares one layer of the student with one of the teacher.

    Args:
        student_layer: path of the student's layer.
        teacher_layer: path of the teacher's layer.
    """

    def __init__(self, student_layer: str = DEFAULT_LAYER, teacher_layer: str = DEFAULT_LAYER) -> None:
        super().__init__()
        self.student_layer, self.teacher_layer = student_layer, teacher_layer
        self.student_layers, self.teacher_layers = {"student_layer": student_layer}, {"teacher_layer": teacher_layer}

    def features(self, student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
        """The outputs of both layers, the student's first."""
        assert teacher is not None
        return student.features[self.student_layer], teacher.features[self.teacher_layer]


def merged(raw: Outputs, views: Mapping[str, Outputs]) -> dict[str, Tensor]:
    """The features of several parts' views of outputs: raw ones once, those that a part made as `<part>><path>`."""
    return {
        path if x is raw.features.get(path) else f"{part}{OWN}{path}": x
        for part, view in views.items()
        for path, x in view.features.items()
    }


def viewed(part: str, outputs: Outputs) -> Outputs:
    """The outputs as one part made them, without the features that others made."""
    raw = {path: x for path, x in outputs.features.items() if OWN not in path}
    prefix = f"{part}{OWN}"
    own = {path.removeprefix(prefix): x for path, x in outputs.features.items() if path.startswith(prefix)}
    return outputs._replace(features=raw | own)


def condensed(raw: Outputs, objectives: Mapping[str, Objective]) -> Outputs:
    """A teacher's outputs as its students need them: features that objectives condensed, and raw ones still needed."""

    def own(objective: Objective) -> Outputs:
        paths = [*objective.teacher_layers.values(), *(path for path in [MEMBERS] if path in raw.features)]
        return raw._replace(features={path: raw.features[path] for path in paths})

    views = {name: o.condense(own(o)) for name, o in objectives.items() if o.uses_teacher}
    return raw._replace(features=merged(raw, views))


def weighted_sum(
    terms: Mapping[str, Term], labels: Tensor, label_weight: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss (b,), and each term's values (b,): of texts, and of labelled terms, as `of_labelled`."""
    of_tokens = labels.dim() > 1
    values = {
        name: of_labelled(term.values, labels, label_weight if term.labelled or of_tokens else None)
        for name, term in terms.items()
    }
    total = sum((values[name] * term.weight for name, term in terms.items()), start=torch.zeros(()))
    return total, values


def of_labelled(values: Tensor, labels: Tensor, label_weight: float | None) -> Tensor:
    """(b,) values whose mean over a global batch is that of its labels that count, or zero; see `Batch.label_weight`.

    Values (b,) or, of texts, (b, T) for each token; labels (b,) or (b, T).
    """
    if label_weight is not None:
        counts, values = label_mask(labels), values * label_weight
        if values.dim() < counts.dim():  # of whole texts
            values, counts = values * counts.to(values.dtype).mean(1), counts.any(1)
        values = values.where(counts, 0.0)
    return values.mean(1) if values.dim() > 1 else values


def shown(labels: Tensor, label_weight: float | None) -> Tensor:
    """The labels, 0 where they do not count."""
    return labels if label_weight is None else labels.where(label_mask(labels), 0)


def masked(outputs: Outputs, counts: Tensor) -> Outputs:
    """The outputs, zero for tokens that do not count, (b, T) bool: logits, and features (b, T, ...)."""
    whole = {path: x for path, x in outputs.features.items() if x.shape[:2] != counts.shape}
    features = {path: _masked(x, counts) for path, x in outputs.features.items() if path not in whole}
    return Outputs(_masked(outputs.logits, counts), whole | features)


def _masked(x: Tensor, counts: Tensor) -> Tensor:
    return x.where(counts.view(*counts.shape, *[1] * (x.dim() - 2)), 0.0)


def widened(x: Tensor) -> Tensor:
    """The tensor; 16-bit types become float32."""
    return x.float() if x.dtype in {torch.float16, torch.bfloat16} else x


def wide(outputs: Outputs) -> Outputs:
    """The outputs, 16-bit types as float32."""
    return Outputs(widened(outputs.logits), {path: widened(x) for path, x in outputs.features.items()})


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(b, ...) of KL(p || q) = sum of p (log p - log q) from log-probabilities (b, ..., classes); 0 log 0 is 0."""
    log_p = log_p.clamp(min=torch.finfo(log_p.dtype).min)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


def checked_temperature(value: float) -> float:
    """The value, if above zero and if float32 holds its square; raises BadInput otherwise."""
    low, high = TEMPERATURES
    if not low <= value <= high:
        raise BadInput("temperature", value, f"a number above 0, from {low:g} to {high:g}")
    return value


def positive(name: str, value: float) -> float:
    """The value, if above zero; raises BadInput otherwise."""
    if not 0 < value < float("inf"):
        raise BadInput(name, value, "a number above 0")
    return value


def weight(name: str, value: float) -> float:
    """The value, if zero or more; raises BadInput otherwise."""
    if not 0 <= value < float("inf"):
        raise BadInput(name, value, "a number of 0 or more")
    return value
