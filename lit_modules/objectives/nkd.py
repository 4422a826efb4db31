"""Normalised knowledge distillation (Yang et al. 2023, arXiv:2303.13005)."""

from torch import Tensor

from lit_modules.objectives.base import Outputs, Term, ce_term, check_temperature, weight
from lit_modules.objectives.logits import LabelObjective, pick_label, split_at_label
from lit_modules.objectives.search import Log, space


class NKD(LabelObjective):
    """target_weight * (-p_t,y log p_s,y) + gamma * T^2 * CE(n_t, n_s) + ce_weight * CE.

    y is the label, p a distribution at T 1, n that over the other classes at T. Both are cross-entropies, which differ
    from divergences by what does not depend on the student. The paper has gamma 1.5 and T 1 for ImageNet; for CIFAR
    with T 3 the code released with it has gamma 3.5.

    Args:
        gamma: weight of the other classes, of which there have to be two or more.
        temperature: T.
        target_weight: weight of the label's class.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    # The paper has gamma 1.5 at temperature 1 for ImageNet, 3.5 at 3 for CIFAR-100.
    search = space(gamma=Log(0.1, 10), temperature=Log(0.5, 4))

    def __init__(
        self,
        gamma: float = 1.5,
        temperature: float = 1.0,
        target_weight: float = 1.0,
        ce_weight: float = 1.0,
        standardize: bool = False,
    ) -> None:
        super().__init__(check_temperature(temperature), standardize)
        self.gamma, self.target_weight = weight("gamma", gamma), weight("target_weight", target_weight)
        self.ce_weight = weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        log_s, log_t = self.log_probabilities(student, teacher, 1.0)
        target = -pick_label(log_t, labels).exp() * pick_label(log_s, labels)
        (*_, rest_s, _), (*_, rest_t, others) = (split_at_label(z, labels) for z in self.temper(student, teacher))
        rest = -(rest_t.exp() * rest_s).where(others, 0.0).sum(-1)
        return {
            "target": Term(target, self.target_weight, labelled=True),
            "others": Term(rest, self.gamma * self.temperature**2, labelled=True),
            "ce": ce_term(student, labels, self.ce_weight),
        }
