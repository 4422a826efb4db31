"""Transformed teacher matching (Zheng and Yang 2024, arXiv:2402.11148)."""

from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Log, space


class TTM(LogitObjective):
    """ttm_weight * u * KL(q || p_s) + ce_weight * CE, q the teacher's p_t to the power gamma, normalised.

    The student has no temperature, and there is no factor T^2. u is 1; or, `weighted` (WTTM), the sum of p_t^gamma over
    the classes, large where the teacher is unsure. The paper chooses weights for each pair of nets: for VGG-13 and
    VGG-8 gamma 0.1 and weight 45, weighted 0.2 and 4.

    Args:
        gamma: the power, 1 / T of Hinton's teacher.
        ttm_weight: weight of the divergence.
        weighted: whether unsure samples count more.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    search = space(gamma=Log(0.05, 0.5), ttm_weight=Log(1, 100))

    def __init__(
        self,
        gamma: float = 0.1,
        ttm_weight: float = 45.0,
        weighted: bool = False,
        ce_weight: float = 1.0,
        standardize: bool = False,
    ) -> None:
        super().__init__(standardize=standardize)
        if not 0 < gamma <= 1:
            raise BadInput("gamma", gamma, "a number above 0, at most 1")
        self.gamma, self.weighted = gamma, weighted
        self.ttm_weight, self.ce_weight = weight("ttm_weight", ttm_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        log_s, log_t = self.log_probabilities(student, teacher)
        powers = self.gamma * log_t
        size = powers.logsumexp(-1, keepdim=True)  # logarithm of the sum of the powers
        q = powers - size
        values = (q.exp() * (q - log_s)).sum(-1) * (size.exp().squeeze(-1) if self.weighted else 1.0)
        return {"ttm": Term(values, self.ttm_weight), "ce": ce_term(student, labels, self.ce_weight)}
