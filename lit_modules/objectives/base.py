"""The base of objectives: functions from outputs of student and teacher to named, weighted, per-sample terms."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.base import DEFAULT_LAYER, Outputs

TEMPERATURES = 1e-18, 1e18  # losses are multiplied by the square


class Term(NamedTuple):
    """One part of a loss: per-sample values (b,) and the weight of their mean."""

    values: Tensor
    weight: float
    is_ce: bool = False  # whether the values are the cross-entropies of the student's logits with the labels


class Objective(nn.Module):
    """A distillation method: names the layers that it reads, and returns its terms.

    It may own trainable parts, made in `build` and used in `adapt`: they train with the student, in its precision, and
    are not exported.

    Attributes:
        uses_teacher: whether it needs the teacher's outputs.
        student_layers: submodule paths whose outputs it reads from `student.features`, by the options that name them;
            "default" is the net's feature layer.
        teacher_layers: the same for the teacher.
        needs: which students have these layers, for the message about one that does not.
        relates_rows: whether a row's value depends on other rows. So far these are the rows that a device computes at
            once, not the global batch, so results change with the device count. Refused if not declared.
    """

    uses_teacher: bool = True
    student_layers: Mapping[str, str] = MappingProxyType({})
    teacher_layers: Mapping[str, str] = MappingProxyType({})
    needs: str = ""
    relates_rows: bool = False

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Make trainable parts for the nets, or refuse these, given their outputs for a few example inputs."""

    def parts(self) -> list[nn.Module]:
        """The modules that hold all trainable parts, each called separately."""
        return list(self.children())

    def adapt(self, student: Outputs) -> Outputs:
        """The student's outputs with features passed through the trainable parts, which `forward` compares.

        Part of the student's forward, so that `forward` needs no parameters and can run wherever the outputs are. The
        logits do not change.
        """
        return student

    def terms(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        """The terms of `forward`, in float32 at least: autocast would compute softmax and differences in bfloat16."""
        with torch.autocast(labels.device.type, enabled=False):
            return self(_widened(student), teacher and _widened(teacher), labels)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        """The terms of b samples. In training all outputs are float32 or float64, also under autocast.

        Args:
            student: logits (b, classes), or (b, T, vocabulary) of tokens, and the student's adapted features.
            teacher: the same of the teacher, without gradients; None if `uses_teacher` is false.
            labels: (b,) int64, or (b, T).
        """
        raise NotImplementedError


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


def widened(x: Tensor) -> Tensor:
    """The tensor; 16-bit types become float32."""
    return x.float() if x.dtype in {torch.float16, torch.bfloat16} else x


def _widened(outputs: Outputs) -> Outputs:
    return Outputs(widened(outputs.logits), {path: widened(x) for path, x in outputs.features.items()})


def per_sample(values: Tensor) -> Tensor:
    """(b,) of values (b,), or of values (b, T) for each token: their mean over a sample."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(b,) of KL(p || q) = sum of p (log p - log q) from log-probabilities (b, ..., classes); for tokens the mean."""
    return per_sample(F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))


def softened_kl(z_p: Tensor, z_q: Tensor, temperature: float) -> Tensor:
    """(b,) of T^2 * KL(softmax(z_p / T) || softmax(z_q / T)), logits (b, ..., classes); T^2 keeps gradients' size."""
    log_p, log_q = (F.log_softmax(z / temperature, -1) for z in (z_p, z_q))
    return kl(log_p, log_q) * temperature**2


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
