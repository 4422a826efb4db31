"""No distillation: the control that every other method is compared with."""

from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Objective, Term


class CrossEntropy(Objective):
    """Cross-entropy with the labels; the teacher is not used."""

    uses_teacher = False

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:  # noqa: D102
        return {"ce": Term(cross_entropy(student.logits, labels), 1.0)}


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """(b,) cross-entropies of logits (b, classes) with labels (b,), or of (b, T, V) with (b, T): means over tokens."""
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)
