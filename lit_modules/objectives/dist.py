"""Distillation from a stronger teacher (Huang et al. 2022, arXiv:2205.10536)."""

import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Log, space

EPS = 1e-8


class DIST(LogitObjective):
    """T^2 * (inter_weight * (1 - r over a sample's classes) + intra_weight * (1 - mean r over a class's samples)) + CE.

    r is Pearson's correlation of the teacher's and the student's probabilities: over the classes of a sample, and for
    each class over the samples of the global batch. CE is weighted by `ce_weight`. The paper has weights 2 and T 4 for
    CIFAR, 1 and 1 for ImageNet.

    Args:
        temperature: T.
        inter_weight: weight of the correlation over classes; 0 for two, whose probabilities correlate by 1 or -1.
        intra_weight: weight of the correlation over samples.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    search = space(temperature=Log(1, 8), inter_weight=Log(0.2, 20), intra_weight=Log(0.2, 20))
    relates_rows = True

    def __init__(
        self,
        temperature: float = 4.0,
        inter_weight: float = 2.0,
        intra_weight: float = 2.0,
        ce_weight: float = 1.0,
        standardize: bool = False,
    ) -> None:
        super().__init__(temperature, standardize)
        self.inter_weight = weight("inter_weight", inter_weight)
        self.intra_weight = weight("intra_weight", intra_weight)
        self.ce_weight = weight("ce_weight", ce_weight)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Raise BadInput for correlations of two values, which have no gradient; each token is a sample."""
        super().build(student, teacher)
        self.refuse_absent()
        if self.inter_weight and (classes := student.logits.shape[-1]) < 3:
            why = "two probabilities always correlate by 1 or -1"
            raise BadInput("inter_weight", self.inter_weight, f"0, as there are {classes} classes: {why}")
        self.fewest_related = 3 if self.intra_weight and student.logits.dim() == 2 else 1

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        p_s, p_t = (z.softmax(-1).flatten(0, -2) for z in self.temper(student, teacher))  # tokens are samples
        inter = (1 - _correlation(p_s, p_t)).view(labels.shape)
        if (counts := context.counted) is not None:
            p_s, p_t = (p[counts.flatten()] for p in (p_s, p_t))
        intra = (1 - _correlation(p_s.T, p_t.T).mean()).expand(len(labels))
        square = self.temperature**2
        return {
            "inter": Term(inter, self.inter_weight * square),
            "intra": Term(intra, self.intra_weight * square),
            "ce": ce_term(student, labels, self.ce_weight),
        }


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    """Correlate the rows of a and b, (n, m): (n,); 0, without gradient, where one is constant up to rounding."""
    a, b = (x - x.mean(1, keepdim=True) for x in (a, b))
    lengths: tuple[Tensor, Tensor] = a.norm(dim=1), b.norm(dim=1)
    constant = torch.minimum(*lengths) <= 16 * torch.finfo(a.dtype).eps
    return ((a * b).sum(1) / (lengths[0] * lengths[1] + EPS)).where(~constant, 0.0)
