"""Attention transfer (Zagoruyko and Komodakis 2017, "Paying More Attention to Attention", arXiv:1612.03928)."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from lit_modules.objectives.base import Outputs, Term, ce_term, weight, widen
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.stages import MapsObjective


class AttentionTransfer(MapsObjective):
    """at_weight * sum over layers of mean((q_s - q_t)^2) + ce_weight * CE, q the attention vector of a layer.

    q is the mean over channels of the squared map, flattened, divided by its length (section 3.1). Of the teacher only
    q is stored: H * W values a layer. The squared difference and its mean over positions are those of the code
    released with the paper, with its weight; equation 2 has the length |q_s - q_t| instead, with half the weight.

    Args:
        at_weight: weight of the difference of attention.
        ce_weight: weight of the cross-entropy with the labels.
        squared: False: the length of equation 2.
        layers: those of StagesObjective; they give maps of any sizes, of which the larger is average-pooled.
    """

    search = space(at_weight=Log(10, 10_000))

    def __init__(self, at_weight: float = 1000.0, ce_weight: float = 1.0, squared: bool = True, **layers: Any) -> None:
        super().__init__(**layers)
        self.at_weight, self.ce_weight = weight("at_weight", at_weight), weight("ce_weight", ce_weight)
        self.squared = squared

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        super().build(student, teacher)
        self.check_positions()

    def reduce(self, maps: Tensor) -> Tensor:
        """Return (b, H * W), the attention vectors of maps (b, C, H, W)."""
        return F.normalize(widen(maps).square().mean(1).flatten(1))

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        differences = [self.reduce(f_s) - q_t for f_s, q_t in self.maps(student, teacher)]
        distances = [d.square().mean(1) if self.squared else d.norm(dim=1) for d in differences]
        at = Term(sum(distances[1:], distances[0]), self.at_weight)
        return {"at": at, "ce": ce_term(student, labels, self.ce_weight)}
