"""Soft targets: Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network"."""

from torch import Tensor

from lit_modules.objectives.base import Outputs, Term, ce_term, kl, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.top_k import TAILS


class Hinton(LogitObjective):
    """kd_weight * T^2 * KL(softmax(z_t / T) || softmax(z_s / T)) + ce_weight * CE.

    Args:
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        kd_weight: weight of the divergence from the teacher.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
        teacher_entropy: whether the term is the cross-entropy, -sum of p log q: the divergence and the teacher's
            entropy, which moves the value of the loss and no gradient.
    """

    tails = TAILS
    search = space(temperature=Log(1, 16), kd_weight=Log(0.025, 25))

    def __init__(
        self, temperature: float = 2.0, kd_weight: float = 0.25, ce_weight: float = 0.75, standardize: bool = False,
        teacher_entropy: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(temperature, standardize)
        self.kd_weight, self.ce_weight = weight("kd_weight", kd_weight), weight("ce_weight", ce_weight)
        self.teacher_entropy = teacher_entropy

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        log_s, log_t = self.log_probabilities(student, teacher)
        soft = kl(log_t, log_s)
        if self.teacher_entropy:
            soft = soft - (log_t.exp() * log_t).sum(-1)
        kd = Term(soft * self.temperature**2, self.kd_weight)
        return {"kd": kd, "ce": ce_term(student, labels, self.ce_weight)}
