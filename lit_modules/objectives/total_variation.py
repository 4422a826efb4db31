"""Total variation distance between the distributions of student and teacher (f-distill, Wen et al. 2023)."""

from torch import Tensor

from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.top_k import DISJOINT


class TotalVariation(LogitObjective):
    """tv_weight * T * 1/2 * sum over classes of |p_t - p_s| + ce_weight * CE, with p = softmax(z / T).

    The factor is T, not T^2 as that of divergences: the gradient of a distance that is not squared shrinks as 1 / T.

    Source: Wen et al. 2023, "f-Divergence Minimization for Sequence-Level Knowledge Distillation" (arXiv:2307.15190),
    its distance for each token, at T 1.

    Args:
        temperature: T, which softens both distributions.
        tv_weight: weight of the distance.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    tails = DISJOINT
    search = space(temperature=Log(0.5, 4), tv_weight=Log(0.1, 10))

    def __init__(
        self, temperature: float = 1.0, tv_weight: float = 1.0, ce_weight: float = 0.0, standardize: bool = False
    ) -> None:
        super().__init__(temperature, standardize)
        self.tv_weight, self.ce_weight = weight("tv_weight", tv_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        log_s, log_t = self.log_probabilities(student, teacher)
        distance = (log_t.exp() - log_s.exp()).abs().sum(-1) / 2
        tv = Term(distance * self.temperature, self.tv_weight)
        return {"tv": tv, "ce": ce_term(student, labels, self.ce_weight)}
