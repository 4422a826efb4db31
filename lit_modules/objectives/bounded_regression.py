"""Regression bounded by a teacher (Chen et al. 2017, "Learning Efficient Object Detection Models with KD")."""

from torch import Tensor

from lit_modules.nets.outputs import VALUES
from lit_modules.objectives.base import Objective, Outputs, Term, ce_term, cross_entropy, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.search import Log, space


class BoundedRegression(Objective):
    """bounded_weight * L_b + ce_weight * the loss of labels, L_b the student's error where the teacher's is less.

    L_b is the loss of labels of the student where it, plus a margin, is more than the teacher's, else 0 (equation 4):
    a teacher is no target, but a bound. In the paper the other term is a smooth L1; here it is the task's.

    Args:
        bounded_weight: weight of L_b; the paper's is 0.5.
        margin: how much less than the teacher's a student's error has to be.
        ce_weight: weight of the loss of labels.
    """

    compares = frozenset({VALUES})
    needs_labels = True
    search = space(bounded_weight=Log(0.05, 5))

    def __init__(self, bounded_weight: float = 0.5, margin: float = 0.0, ce_weight: float = 1.0) -> None:
        super().__init__()
        self.bounded_weight, self.margin = weight("bounded_weight", bounded_weight), weight("margin", margin)
        self.ce_weight = weight("ce_weight", ce_weight)

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        assert teacher is not None
        loss, known = context.loss or cross_entropy, labels if context.labels is None else context.labels
        error, bound = loss(student.logits, known), loss(teacher.logits, known)
        bounded = Term(error.where(error + self.margin > bound, 0.0), self.bounded_weight, labelled=True)
        return {"bounded": bounded, "ce": ce_term(student, labels, self.ce_weight)}
