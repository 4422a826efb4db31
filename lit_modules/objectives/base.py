"""What an objective is: from outputs of student and teacher to named, weighted, per-sample terms."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import DEFAULT_LAYER, Outputs


class Term(NamedTuple):
    """One part of a loss: per-sample values (b,) and the weight with which their mean counts.

    Attributes:
        is_ce: whether the values are the cross-entropies of the student's logits with the labels.
    """

    values: Tensor
    weight: float
    is_ce: bool = False


class Objective(nn.Module):
    """A distillation method: says which layers it wants to see, and returns its terms.

    It may own trainable parts, made in `build` and used in `adapt`: they train with the student, in its precision, and
    are not part of what is exported.

    Attributes:
        uses_teacher: whether the teacher's outputs are needed at all.
        student_layers: submodule paths whose outputs are wanted in `student.features`, by the options that name them;
            "default" is the net's own.
        teacher_layers: the same for the teacher.
        needs: in words, what student has the layers; told of one that lacks them.
        relates_rows: whether a row's value depends on other rows. These are, so far, the rows that a device computes at
            a time and not the global batch, so that numbers move with the device count; undeclared it is refused.
    """

    uses_teacher: bool = True
    student_layers: Mapping[str, str] = MappingProxyType({})
    teacher_layers: Mapping[str, str] = MappingProxyType({})
    needs: str = ""
    relates_rows: bool = False

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Make trainable parts, or refuse the pair, given the outputs for a few example inputs."""

    def parts(self) -> list[nn.Module]:
        """The modules that hold all trainable parts; each is called by itself."""
        return list(self.children())

    def adapt(self, student: Outputs) -> Outputs:
        """What `forward` compares: the student's outputs, with features that have passed the trainable parts.

        It belongs to the student's forward, so that `forward` has no parameters and can be computed wherever the
        outputs are. The logits stay what they are.
        """
        return student

    def terms(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        """What `forward` gives, in float32 at least: autocast would take softmax and differences in bfloat16."""
        with torch.autocast(labels.device.type, enabled=False):
            return self(_widened(student), teacher and _widened(teacher), labels)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        """The terms of b samples.

        Args:
            student: logits (b, classes), or of T tokens each (b, T, vocabulary), and the student's features, adapted.
            teacher: the same of the teacher, without gradients; None where `uses_teacher` is false.
            labels: (b,) int64, or (b, T).

        In training outputs are float32 or float64, also under autocast.
        """
        raise NotImplementedError


class FeatureObjective(Objective):
    """An objective that compares one layer of the student with one of the teacher."""

    def __init__(self, student_layer: str = DEFAULT_LAYER, teacher_layer: str = DEFAULT_LAYER) -> None:
        super().__init__()
        self.student_layer, self.teacher_layer = student_layer, teacher_layer
        self.student_layers, self.teacher_layers = {"student_layer": student_layer}, {"teacher_layer": teacher_layer}

    def features(self, student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
        """The two layers' outputs, the student's first."""
        assert teacher is not None
        return student.features[self.student_layer], teacher.features[self.teacher_layer]


def widened(x: Tensor) -> Tensor:
    """The tensor, in float32 if its own type has fewer bits."""
    return x.float() if x.dtype in {torch.float16, torch.bfloat16} else x


def _widened(outputs: Outputs) -> Outputs:
    return Outputs(widened(outputs.logits), {path: widened(x) for path, x in outputs.features.items()})


def per_sample(values: Tensor) -> Tensor:
    """(b,) of values (b,), one a sample, or (b, T), one a token: then the mean over a sample's tokens."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def positive(name: str, value: float) -> float:
    """The value, if it is above zero; raises BadInput otherwise."""
    if not 0 < value < float("inf"):
        raise BadInput(name, value, "a number above 0")
    return value


def weight(name: str, value: float) -> float:
    """The value, if it is zero or more; raises BadInput otherwise."""
    if not 0 <= value < float("inf"):
        raise BadInput(name, value, "a number of 0 or more")
    return value


def inside(name: str, value: float) -> float:
    """The value, if it is between zero and one, both excluded; raises BadInput otherwise."""
    if not 0 < value < 1:
        raise BadInput(name, value, "a number above 0 and below 1")
    return value
