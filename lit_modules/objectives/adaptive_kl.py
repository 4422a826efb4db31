"""Adaptive Kullback-Leibler divergence: forward and reverse by where the student is wrong (Wu et al. 2024)."""

import torch
from torch import Tensor

from apprentice.errors import BadInput
from lit_modules.objectives.base import Outputs, Term, ce_term, kl, weight
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Linear, Log, space
from lit_modules.objectives.top_k import DISJOINT


class AdaptiveKL(LogitObjective):
    """akl_weight * T^2 * (a KL(p_t || p_s) + (1 - a) KL(p_s || p_t)) + ce_weight * CE, with p = softmax(z / T).

    a = g_head / (g_head + g_tail), without a gradient, where g is the sum of |p_t - p_s| over the head, the teacher's
    likeliest classes up to the first at which their probabilities add up to `head` or more, and over the rest. Forward
    KL learns the head first, reverse KL the tail. Where both nets agree exactly, a is 1/2.

    Source: Wu et al. 2024, "Rethinking Kullback-Leibler Divergence in Knowledge Distillation for Large Language Models"
    (arXiv:2404.02657), at T 1.

    Args:
        head: the head's probability, mu in the paper.
        temperature: T, which softens both distributions; the factor T^2 keeps the gradients' size.
        akl_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    tails = DISJOINT
    search = space(head=Linear(0.1, 0.9), temperature=Log(0.5, 4), akl_weight=Log(0.1, 10))

    def __init__(
        self,
        head: float = 0.5,
        temperature: float = 1.0,
        akl_weight: float = 1.0,
        ce_weight: float = 0.0,
        standardize: bool = False,
    ) -> None:
        super().__init__(temperature, standardize)
        if not 0 < head < 1:
            raise BadInput("head", head, "a probability above 0 and below 1")
        self.head = head
        self.akl_weight, self.ce_weight = weight("akl_weight", akl_weight), weight("ce_weight", ce_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        log_s, log_t = self.log_probabilities(student, teacher)
        share = forward_share(log_s.detach(), log_t, self.head)
        divergence = share * kl(log_t, log_s) + (1 - share) * kl(log_s, log_t)
        akl = Term(divergence * self.temperature**2, self.akl_weight)
        return {"akl": akl, "ce": ce_term(student, labels, self.ce_weight)}


def forward_share(log_s: Tensor, log_t: Tensor, head: float) -> Tensor:
    """Return (b, ...), the head's share of the sum of |p_t - p_s|, of log-probabilities (b, ..., classes)."""
    p_t, order = log_t.exp().sort(dim=-1, descending=True, stable=True)
    gaps = (p_t - log_s.exp().gather(-1, order)).abs()
    before = p_t.cumsum(-1) - p_t  # the probability of likelier classes
    in_head = before < head
    in_head[..., 0] = True
    whole = gaps.sum(-1)
    share = gaps.where(in_head, 0.0).sum(-1) / whole.where(whole > 0, 1.0)
    return torch.where(whole > 0, share, 0.5)
