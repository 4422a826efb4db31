"""Multi-label logit distillation (L2D, Yang et al. 2023, arXiv:2308.06453)."""

from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.outputs import LABELS
from lit_modules.objectives.base import Objective, Outputs, Term, ce_term, weight
from lit_modules.objectives.search import Log, space


class MLD(Objective):
    """mld_weight * KL(Bernoulli of the teacher || Bernoulli of the student) + ce_weight * the loss of labels.

    Each label is an event of its own, of probability sigmoid(z). The divergence is a mean over labels, as the loss of
    labels is; the released code has sums of both, in the same ratio. It is computed from logits: the code's clamp of
    probabilities at 1e-8 is lost in float32, and gives an infinite loss without gradient from logits of 17. Unlike the
    loss of labels it also counts those that are unknown.

    Args:
        mld_weight: weight of the divergence.
        ce_weight: weight of the loss of labels.
    """

    compares = frozenset({LABELS})
    search = space(mld_weight=Log(1, 100))

    def __init__(self, mld_weight: float = 10.0, ce_weight: float = 1.0) -> None:
        super().__init__()
        self.mld_weight, self.ce_weight = weight("mld_weight", mld_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        assert teacher is not None
        values = bernoulli_kl(teacher.logits, student.logits).mean(1)
        return {"mld": Term(values, self.mld_weight), "ce": ce_term(student, labels, self.ce_weight)}


def bernoulli_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return (b, C), KL(Bernoulli(sigmoid(teacher)) || Bernoulli(sigmoid(student))) of logits (b, C)."""
    yes = teacher.sigmoid() * (F.logsigmoid(teacher) - F.logsigmoid(student))
    no = (-teacher).sigmoid() * (F.logsigmoid(-teacher) - F.logsigmoid(-student))
    return yes + no
