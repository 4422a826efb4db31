"""Generalised knowledge distillation of language models (GKD, Agarwal et al. 2024), on the data's own texts."""

from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.objectives.base import Linear, Log, Outputs, Term, ce_term, space, weight
from lit_modules.objectives.jensen_shannon import generalized_jsd
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.top_k import DISJOINT


class GKD(LogitObjective):
    """gkd_weight * T^2 * JSD_beta(p_t, p_s) + ce_weight * CE, with p = softmax(z / T).

    JSD_beta is beta KL(p_t || m) + (1 - beta) KL(p_s || m), m = beta p_t + (1 - beta) p_s; at its ends it is not this
    formula, which would be 0, but KL(p_t || p_s) for beta 0 and KL(p_s || p_t) for beta 1, as in TRL.

    Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (arXiv:2306.13649), equation 1. TRL's loss
    is this one at T 1; it has no factor T^2.

    Args:
        beta: the teacher's share of the mixture, 0 to 1.
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        gkd_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    tails = DISJOINT
    search = space(beta=Linear(0, 1), temperature=Log(0.5, 4), gkd_weight=Log(0.1, 10), ce_weight=Linear(0, 1))

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        gkd_weight: float = 1.0,
        ce_weight: float = 0.0,
        standardize: bool = False,
    ) -> None:
        super().__init__(temperature, standardize)
        if not 0 <= beta <= 1:
            raise BadInput("beta", beta, "a number from 0 to 1")
        self.beta = beta
        self.gkd_weight, self.ce_weight = weight("gkd_weight", gkd_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        divergence = generalized_jsd(*self.log_probabilities(student, teacher), self.beta)
        gkd = Term(divergence * self.temperature**2, self.gkd_weight)
        return {"gkd": gkd, "ce": ce_term(student, labels, self.ce_weight)}
