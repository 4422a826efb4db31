"""Skewed Kullback-Leibler divergences (DistiLLM, Ko et al. 2024)."""

import math

import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, kl, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Choice, Linear, Log, space
from lit_modules.objectives.top_k import DISJOINT


class SkewKL(LogitObjective):
    """skew_weight * T^2 * KL(p_t || alpha p_t + (1 - alpha) p_s) + ce_weight * CE, with p = softmax(z / T).

    With `reverse` it is KL(p_s || (1 - alpha) p_t + alpha p_s). The second distribution is never much smaller than the
    first, so that the gradient stays bounded where the divergence without the skew, alpha 0, explodes.

    Source: Ko et al. 2024, "DistiLLM: Towards Streamlined Distillation for Large Language Models" (arXiv:2402.03898),
    equation 3 at T 1, without the paper's texts from the student.

    Args:
        alpha: share of the first distribution in the second.
        reverse: whether the student's distribution comes first.
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        skew_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    tails = DISJOINT
    search = space(
        alpha=Linear(0, 0.5), reverse=Choice((False, True)), temperature=Log(0.5, 4), skew_weight=Log(0.1, 10)
    )

    def __init__(
        self,
        alpha: float = 0.1,
        reverse: bool = False,
        temperature: float = 1.0,
        skew_weight: float = 1.0,
        ce_weight: float = 0.0,
        standardize: bool = False,
    ) -> None:
        super().__init__(temperature, standardize)
        if not 0 <= alpha < 1:
            raise BadInput("alpha", alpha, "a share of 0 or more, below 1")
        self.alpha, self.reverse = alpha, reverse
        self.skew_weight, self.ce_weight = weight("skew_weight", skew_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        second, first = self.log_probabilities(student, teacher)
        if self.reverse:
            first, second = second, first
        if self.alpha:
            second = torch.logaddexp(first + math.log(self.alpha), second + math.log1p(-self.alpha))
        skew = Term(kl(first, second) * self.temperature**2, self.skew_weight)
        return {"skew": skew, "ce": ce_term(student, labels, self.ce_weight)}
