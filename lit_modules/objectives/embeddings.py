"""The base class of objectives that relate samples."""

from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.nets.outputs import KINDS
from lit_modules.objectives.base import FeatureObjective, Outputs


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
