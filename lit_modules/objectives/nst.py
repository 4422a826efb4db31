"""Neuron selectivity transfer (Huang and Wang 2017, "Like What You Like", arXiv:1707.01219)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.objectives.base import Outputs, Term, ce_term, weight, widen
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.stages import MapsObjective


class NST(MapsObjective):
    """nst_weight * sum over layers of (mean K_tt + mean K_ss - 2 mean K_st) + ce_weight * CE.

    K_ab has (<x_c, y_d>)^2 for each channel c of net a and d of net b, where x_c is a channel's map, flattened and
    divided by its length: the squared maximum mean discrepancy with the polynomial kernel of degree 2, without
    constant (equations 4 and 7). The weight is that of the comparison by Tian et al. 2020 (arXiv:1910.10699). The nets
    may have different numbers of channels. Products are batched: the largest tensor has max(C * H * W, C * C) values a
    sample.

    Args:
        nst_weight: weight of the discrepancy.
        ce_weight: weight of the cross-entropy with the labels.
        layers: those of StagesObjective; they give maps of any sizes, of which the larger is average-pooled.
    """

    search = space(nst_weight=Log(0.5, 500))

    def __init__(self, nst_weight: float = 50.0, ce_weight: float = 1.0, **layers: Any) -> None:
        super().__init__(**layers)
        self.nst_weight, self.ce_weight = weight("nst_weight", nst_weight), weight("ce_weight", ce_weight)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        super().build(student, teacher)
        self.check_positions()

    def reduce(self, maps: Tensor) -> Tensor:
        """Return (b, C, H * W), each channel's map divided by its length."""
        return F.normalize(widen(maps).flatten(2), dim=2)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        pairs = [(self.reduce(f_s), x_t) for f_s, x_t in self.maps(student, teacher)]
        discrepancies = [_kernel(x_t, x_t) + _kernel(x_s, x_s) - 2 * _kernel(x_s, x_t) for x_s, x_t in pairs]
        nst = Term(sum(discrepancies[1:], discrepancies[0]), self.nst_weight)
        return {"nst": nst, "ce": ce_term(student, labels, self.ce_weight)}


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return (b,), the means of K for x (b, C, P) and y (b, D, P)."""
    return torch.bmm(x, y.mT).square().mean((1, 2))
