"""No distillation: the control for every other method."""

from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Objective, Term, per_sample, widened


class CrossEntropy(Objective):
    """Cross-entropy with the labels; the teacher is not used."""

    uses_teacher = False

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:  # noqa: D102
        return {"ce": ce_term(student, labels, 1.0)}


def ce_term(student: Outputs, labels: Tensor, weight: float) -> Term:
    """The cross-entropy of the student's logits with the labels."""
    return Term(cross_entropy(student.logits, labels), weight, is_ce=True)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """(b,) cross-entropies of logits (b, classes) with labels (b,); for (b, T, classes) and (b, T) means over T."""
    losses = F.cross_entropy(widened(logits).flatten(0, -2), labels.flatten(), reduction="none")
    return per_sample(losses.view_as(labels))
