"""Reverse Kullback-Leibler divergence, which lets a small student ignore some modes of the teacher (MiniLLM)."""

from torch import Tensor

from lit_modules.objectives.base import Outputs, Term, ce_term, kl, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.top_k import DISJOINT


class ReverseKL(LogitObjective):
    """reverse_weight * T^2 * KL(softmax(z_s / T) || softmax(z_t / T)) + ce_weight * CE.

    Source: Gu et al. 2024, "MiniLLM: Knowledge Distillation of Large Language Models" (arXiv:2306.08543). This is its
    divergence for each token of the data, without the paper's sampling from the student.

    Args:
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        reverse_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    tails = DISJOINT
    search = space(temperature=Log(1, 16), reverse_weight=Log(0.025, 25))

    def __init__(
        self, temperature: float = 2.0, reverse_weight: float = 0.25, ce_weight: float = 0.75, standardize: bool = False
    ) -> None:
        super().__init__(temperature, standardize)
        self.reverse_weight, self.ce_weight = weight("reverse_weight", reverse_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        log_s, log_t = self.log_probabilities(student, teacher)
        reverse = Term(kl(log_s, log_t) * self.temperature**2, self.reverse_weight)
        return {"reverse": reverse, "ce": ce_term(student, labels, self.ce_weight)}
