"""Soft targets: Hinton, Vinyals, Dean 2015, "Distilling the Knowledge in a Neural Network"."""

from torch import Tensor

from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Objective, Term, checked_temperature, softened_kl, weight
from lit_modules.objectives.cross_entropy import ce_term


class Hinton(Objective):
    """kd_weight * T^2 * KL(softmax(z_t / T) || softmax(z_s / T)) + ce_weight * CE.

    Args:
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        kd_weight: weight of the divergence from the teacher.
        ce_weight: weight of the cross-entropy with the labels.
    """

    def __init__(self, temperature: float = 2.0, kd_weight: float = 0.25, ce_weight: float = 0.75) -> None:
        super().__init__()
        self.temperature = checked_temperature(temperature)
        self.kd_weight, self.ce_weight = weight("kd_weight", kd_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:  # noqa: D102
        assert teacher is not None
        kd = Term(softened_kl(teacher.logits, student.logits, self.temperature), self.kd_weight)
        return {"kd": kd, "ce": ce_term(student, labels, self.ce_weight)}
