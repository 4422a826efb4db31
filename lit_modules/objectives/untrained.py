"""The student as it began: the control for methods that learn without labels."""

from torch import Tensor

from lit_modules.objectives.base import Objective, Outputs, Term


class Untrained(Objective):
    """Nothing: the student keeps its first weights, and stops before the first batch."""

    uses_teacher = False
    learns = False
    compares = frozenset({"embeddings", "scores"})

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        return {"none": Term(0 * student.logits.flatten(1).sum(1), 1.0)}
