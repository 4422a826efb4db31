"""No distillation: the control for every other method."""

from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets.outputs import CLASSES, LABELS, VALUES
from lit_modules.objectives.base import Outputs, Term, ce_term, cross_entropy
from lit_modules.objectives.search import Linear, space
from lit_modules.objectives.text_objective import TextObjective


class CrossEntropy(TextObjective):
    """Cross-entropy with the labels, or the task's loss of labels that are no classes; the teacher is not used.

    Args:
        label_smoothing: share of the label that is spread over all classes, its own too (Szegedy et al. 2016), as torch
            has it. The plain cross-entropy is then a term of weight 0.
    """

    compares = frozenset({CLASSES, LABELS, VALUES})
    search = space(label_smoothing=Linear(0, 0.3))
    uses_teacher = False
    by_token = True

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0 <= label_smoothing < 1:
            raise BadInput("label_smoothing", label_smoothing, "a share of 0 or more, below 1")
        if label_smoothing:
            self.compares = frozenset({CLASSES})
        self.label_smoothing = label_smoothing

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        if not self.label_smoothing:
            return {"ce": ce_term(student, labels, 1.0)}
        smooth = cross_entropy(student.logits, labels, self.label_smoothing)
        return {"smooth": Term(smooth, 1.0, labelled=True, class_weighted=True), "ce": ce_term(student, labels, 0.0)}
