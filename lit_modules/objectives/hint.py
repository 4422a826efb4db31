"""Hints: Romero et al. 2015, "FitNets: Hints for Thin Deep Nets", trained in one phase as in the tutorial."""

from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.outputs import CLASSES, LABELS, VALUES
from lit_modules.nets.tokens import as_maps
from lit_modules.objectives.base import FeatureObjective, Outputs, Term, ce_term, weight
from lit_modules.objectives.search import Log, space


class Hint(FeatureObjective):
    """hint_weight * MSE(regressor(F_s), F_t) + ce_weight * CE; the regressor is a trained 3 x 3 convolution.

    Args:
        hint_weight: weight of the squared difference, a mean over channels and positions.
        ce_weight: weight of the cross-entropy with the labels.
        layers: those of FeatureObjective, with maps (b, C_s, H, W) and (b, C_t, H, W), or tokens of as many patches.
    """

    compares = frozenset({CLASSES, LABELS, VALUES})
    regressor: nn.Module
    search = space(hint_weight=Log(0.025, 25))

    def __init__(self, hint_weight: float = 0.25, ce_weight: float = 0.75, **layers: Any) -> None:
        super().__init__(**layers)
        self.hint_weight, self.ce_weight = weight("hint_weight", hint_weight), weight("ce_weight", ce_weight)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        f_s, f_t = self.maps(student, teacher)
        if f_s.dim() != 4 or f_s.shape[2:] != f_t.shape[2:]:
            sizes = f"the student's is {tuple(f_s.shape[1:])}, the teacher's {tuple(f_t.shape[1:])}"
            raise BadInput("student_layer", self.student_layer, f"maps of one height and width; {sizes}")
        self.regressor = nn.Conv2d(f_s.shape[1], f_t.shape[1], 3, padding=1)

    def adapt(self, student: Outputs) -> Outputs:
        """Replace the student's maps by the regressor's (b, C_t, H, W)."""
        f_s = as_maps(student.features[self.student_layer], self.grids[0])
        return student.with_features({self.student_layer: self.regressor(f_s)})

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        f_s, (_, f_t) = student.features[self.student_layer], self.maps(student, teacher)
        distance = (f_s - f_t).square().mean((1, 2, 3))  # (b,)
        return {"hint": Term(distance, self.hint_weight), "ce": ce_term(student, labels, self.ce_weight)}
