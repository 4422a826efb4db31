"""Teacher-free knowledge distillation (Yuan et al. 2020, arXiv:1909.11723), by a designed teacher."""

import math

from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.objectives.base import Objective, Outputs, Term, ce_term, check_temperature, weight
from lit_modules.objectives.logits import pick_label
from lit_modules.objectives.search import Linear, Log, space


class TfKD(Objective):
    """alpha * KL(u^T || p_s^T) + (1 - alpha) * CE, without a teacher (Tf-KD_reg).

    u has `correct` for the label and equal shares for the others; u^T and p_s^T are softened by T, u^T in proportion to
    u^(1/T). The code released with the paper differs: softmax(u / T), which is almost uniform, a student at T 1, and a
    mean over classes too. It chooses alpha and T for each net: 0.1 and 20 for ResNet-18, up to 0.95 and 40 for others.

    Args:
        alpha: weight of the divergence.
        correct: u's probability of the label.
        temperature: T.
    """

    search = space(alpha=Linear(0.05, 0.95), temperature=Log(2, 100))
    uses_teacher = False

    def __init__(self, alpha: float = 0.1, correct: float = 0.99, temperature: float = 20.0) -> None:
        super().__init__()
        if not 0 < correct < 1:
            raise BadInput("correct", correct, "a probability above 0 and below 1")
        if weight("alpha", alpha) > 1:
            raise BadInput("alpha", alpha, "a number from 0 to 1")
        self.alpha, self.correct, self.temperature = alpha, correct, check_temperature(temperature)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        log_p = F.log_softmax(student.logits / self.temperature, -1)
        count = log_p.shape[-1] - 1
        high, low = (math.log(u) / self.temperature for u in (self.correct, (1 - self.correct) / count))
        size = math.log(math.exp(high) + count * math.exp(low))
        high, low = high - size, low - size  # logarithms of u^T
        log_p_label = pick_label(log_p, labels)
        entropy = math.exp(high) * high + count * math.exp(low) * low
        values = entropy - math.exp(high) * log_p_label - math.exp(low) * (log_p.sum(-1) - log_p_label)
        regularised = Term(values, self.alpha, labelled=True)
        return {"tfkd": regularised, "ce": ce_term(student, labels, 1 - self.alpha)}
