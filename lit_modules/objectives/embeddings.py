"""The base classes of objectives that relate samples."""

from abc import abstractmethod

from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets.outputs import KINDS
from lit_modules.objectives.base import FeatureObjective, Outputs, Term, ce_term
from lit_modules.objectives.context import NO_STEP, StepContext


class EmbeddingObjective(FeatureObjective):
    """An objective that relates the samples of a global batch by an embedding of each.

    Args:
        student_layer: path of the student's layer, flattened.
        teacher_layer: path of the teacher's layer, flattened.
    """

    compares = frozenset(KINDS)
    relates_rows = True
    fewest_related = 2

    def __init__(self, student_layer: str = "pooled", teacher_layer: str = "pooled") -> None:
        super().__init__(student_layer, teacher_layer)

    def embeddings(self, student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
        """Return embeddings (B, d_s) and (B, d_t) of all rows of the global batch."""
        f_s, f_t = self.features(student, teacher)
        return f_s.flatten(1), f_t.flatten(1)

    def check_directions(self, student: Outputs, option: str, value: str | float, expected: str) -> None:
        """Raise BadInput for `option` if the student's embeddings have one value: their cosines are 1 or -1."""
        if student.features[self.student_layer].flatten(1).shape[1] < 2:
            why = f"{self.student_layer} of the student has one value, whose cosines are 1 or -1 and have no gradient"
            raise BadInput(option, value, f"{expected}: {why}")


class RelationObjective(EmbeddingObjective):
    """An objective whose terms are of relations alone, and a term of labels where there are any.

    Of rows of k texts, nets give an embedding of each, (B, k, D): every text is a sample, B * k of them, with a value.

    Attributes:
        ce_weight: weight of the cross-entropy with the labels, if there are any.
    """

    ce_weight: float

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        if context.has_labels:
            terms = self.relations(*self.embeddings(student, teacher))
            return {**terms, "ce": ce_term(student, labels, self.ce_weight)}
        rows = student.logits.shape[:-1]  # (B,), or (B, k) of texts
        terms = self.relations(*(f.reshape(rows.numel(), -1) for f in self.features(student, teacher)))
        return {name: term._replace(values=term.values.view(rows)) for name, term in terms.items()}

    @abstractmethod
    def relations(self, e_s: Tensor, e_t: Tensor) -> dict[str, Term]:
        """Return terms with a value for each sample, (n,), of all embeddings (n, d_s) and (n, d_t)."""
