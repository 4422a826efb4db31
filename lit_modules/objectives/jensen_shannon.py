"""Generalised Jensen-Shannon divergence (GKD, Agarwal et al. 2024)."""

import math

import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, kl, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Linear, Log, space
from lit_modules.objectives.top_k import DISJOINT


class JensenShannon(LogitObjective):
    """js_weight * T^2 * (beta KL(p_t || m) + (1 - beta) KL(p_s || m)) + ce_weight * CE, m = beta p_t + (1 - beta) p_s.

    p = softmax(z / T). Divided by beta it tends to KL(p_t || p_s) as beta goes to 0; divided by 1 - beta, to
    KL(p_s || p_t) as beta goes to 1.

    Source: Agarwal et al. 2024, "On-Policy Distillation of Language Models" (GKD, arXiv:2306.13649). This is its loss
    on the data's texts (the paper's lambda 0), without texts that the student generates.

    Args:
        beta: the teacher's share of the mixture.
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        js_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    tails = DISJOINT
    search = space(beta=Linear(0.1, 0.9), temperature=Log(1, 16), js_weight=Log(0.025, 25))

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 2.0,
        js_weight: float = 0.25,
        ce_weight: float = 0.75,
        standardize: bool = False,
    ) -> None:
        super().__init__(temperature, standardize)
        if not 0 < beta < 1:
            raise BadInput("beta", beta, "a number above 0 and below 1")
        self.beta = beta
        self.js_weight, self.ce_weight = weight("js_weight", js_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        divergence = generalized_jsd(*self.log_probabilities(student, teacher), self.beta)
        js = Term(divergence * self.temperature**2, self.js_weight)
        return {"js": js, "ce": ce_term(student, labels, self.ce_weight)}


def generalized_jsd(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Return (b, ...), beta KL(p_t || m) + (1 - beta) KL(p_s || m) with m = beta p_t + (1 - beta) p_s.

    The distributions are log-probabilities (b, ..., classes). At its ends, KL(p_t || p_s) for beta 0 and
    KL(p_s || p_t) for beta 1, it is not the formula, which is 0 there.
    """
    if beta in (0, 1):
        return kl(log_s, log_t) if beta else kl(log_t, log_s)
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
    return beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)
