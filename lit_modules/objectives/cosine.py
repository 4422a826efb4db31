"""Cosine similarity of flattened features: the tutorial's CosineLoss."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.objectives.base import FeatureObjective, Outputs, Term, ce_term, check_map, weight
from lit_modules.objectives.search import Log, space


class Cosine(FeatureObjective):
    """cosine_weight * (1 - cos(f_s, f_t)) + ce_weight * CE; the longer flattened features are pooled to the shorter.

    Source: PyTorch, "Knowledge Distillation Tutorial", which pools the teacher's 2048 values to 1024.

    Args:
        cosine_weight: weight of the cosine distance between the features.
        ce_weight: weight of the cross-entropy with the labels.
        layers: those of FeatureObjective, of more than one value. Beside maps, tokens of patches are compared as maps.
    """

    search = space(cosine_weight=Log(0.025, 25))

    def __init__(self, cosine_weight: float = 0.25, ce_weight: float = 0.75, **layers: Any) -> None:
        super().__init__(**layers)
        self.cosine_weight, self.ce_weight = weight("cosine_weight", cosine_weight), weight("ce_weight", ce_weight)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        pair = self._pair(student, teacher)
        for flag, features, grid in zip(("student_layer", "teacher_layer"), pair, self.grids, strict=True):
            if grid and features.dim() == 3 and any(f.dim() == 4 for f in pair):
                check_map(flag, getattr(self, flag), features, grid)
            if features.flatten(1).shape[1] < 2:
                expected = "a layer of more than one value, whose cosine would be 1 or -1 and has no gradient"
                raise BadInput(flag, getattr(self, flag), expected)

    def _pair(self, student: Outputs, teacher: Outputs | None) -> tuple[Tensor, Tensor]:
        """Return both features; beside maps, tokens of patches as maps."""
        features, maps = self.features(student, teacher), self.maps(student, teacher)
        return features if all(f.dim() == 3 for f in features) or any(f.dim() < 3 for f in features) else maps

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        f_s, f_t = (f.flatten(1) for f in self._pair(student, teacher))
        size = min(f_s.shape[1], f_t.shape[1])
        f_s, f_t = (F.adaptive_avg_pool1d(f[:, None], size)[:, 0] if f.shape[1] > size else f for f in (f_s, f_t))
        distance = F.cosine_embedding_loss(f_s, f_t, f_s.new_ones(len(f_s)), reduction="none")  # (b,)
        return {"cosine": Term(distance, self.cosine_weight), "ce": ce_term(student, labels, self.ce_weight)}
