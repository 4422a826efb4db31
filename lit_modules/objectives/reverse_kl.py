"""Reverse Kullback-Leibler divergence, which lets a small student ignore some modes of the teacher (MiniLLM)."""

from torch import Tensor

from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Objective, Term, checked_temperature, softened_kl, weight
from lit_modules.objectives.cross_entropy import ce_term


class ReverseKL(Objective):
    """reverse_weight * T^2 * KL(softmax(z_s / T) || softmax(z_t / T)) + ce_weight * CE.

    Source: Gu et al. 2024, "MiniLLM: Knowledge Distillation of Large Language Models" (arXiv:2306.08543). This is its
    divergence for each token of the data, without the paper's sampling from the student.

    Args:
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        reverse_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
    """

    def __init__(self, temperature: float = 2.0, reverse_weight: float = 0.25, ce_weight: float = 0.75) -> None:
        super().__init__()
        self.temperature = checked_temperature(temperature)
        self.reverse_weight, self.ce_weight = weight("reverse_weight", reverse_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:  # noqa: D102
        assert teacher is not None
        reverse = Term(softened_kl(student.logits, teacher.logits, self.temperature), self.reverse_weight)
        return {"reverse": reverse, "ce": ce_term(student, labels, self.ce_weight)}
