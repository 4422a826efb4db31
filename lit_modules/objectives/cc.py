"""Correlation congruence (Peng et al. 2019, "Correlation Congruence for Knowledge Distillation", arXiv:1904.01802)."""

import math
from typing import Any

import torch
from torch import Tensor

from lit_modules.objectives.base import Outputs, Term, positive, weight
from lit_modules.objectives.embeddings import RelationObjective
from lit_modules.objectives.search import Log, space

ORDER = 2  # of the expansion, as in the paper's experiments


class CC(RelationObjective):
    """cc_weight * sum over j of (k_s - k_t)_ij^2 / B + ce_weight * CE, k_ij the correlation of samples i and j.

    k is the Gaussian kernel exp(-gamma |a_i - a_j|^2) of embeddings divided by their length, expanded to second order:
    the sum over p = 0, 1, 2 of exp(-2 gamma) (2 gamma)^p / p! <a_i, a_j>^p (equation 9), over the global batch. This is
    the paper's loss; the method "CC" of Tian et al. 2020 (arXiv:1910.10699) is a different one.

    Args:
        cc_weight: weight of the difference of correlations; 100 is that of a public reimplementation.
        gamma: of the kernel.
        ce_weight: weight of the cross-entropy with the labels.
        layers: those of RelationObjective.
    """

    search = space(cc_weight=Log(1, 1000), gamma=Log(0.1, 2))

    def __init__(self, cc_weight: float = 100.0, gamma: float = 0.4, ce_weight: float = 1.0, **layers: Any) -> None:
        super().__init__(**layers)
        self.cc_weight, self.ce_weight = weight("cc_weight", cc_weight), weight("ce_weight", ce_weight)
        self.gamma = positive("gamma", gamma)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        self.check_directions(student, "student_layer", self.student_layer, "a layer of more values")

    def relations(self, e_s: Tensor, e_t: Tensor) -> dict[str, Term]:
        k_s, k_t = (_correlations(e, self.gamma) for e in (e_s, e_t))
        return {"cc": Term((k_s - k_t).square().mean(1), self.cc_weight)}


def _correlations(e: Tensor, gamma: float) -> Tensor:
    """Return the correlations (B, B) of the rows of e (B, d)."""
    squares = e.square().sum(1, keepdim=True)
    a = (e / squares.where(squares > 0, 1.0).sqrt()).where(squares > 0, 0.0)  # a row of zeros gets no gradient
    products = a @ a.T
    factors = [math.exp(-2 * gamma) * (2 * gamma) ** p / math.factorial(p) for p in range(ORDER + 1)]
    return torch.stack([factor * products**p for p, factor in enumerate(factors)]).sum(0)
