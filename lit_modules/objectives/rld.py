"""Refined logit distillation (Sun et al. 2025, "Knowledge Distillation with Refined Logits", arXiv:2408.07703)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Term, weight
from lit_modules.objectives.cross_entropy import ce_term
from lit_modules.objectives.logits import LogitObjective, check_classes, divergence, of_label, split_at_label, tempered
from lit_modules.objectives.search import Log, space


class RLD(LogitObjective):
    """alpha * SCD + beta * T^2 * MCD + ce_weight * CE.

    SCD, at T 1, is the divergence between the teacher's (max p_t, 1 - max p_t) and the student's (p_s,y, 1 - p_s,y), y
    the label: the student becomes as confident, and right. MCD, at T, is that between the distributions over the
    classes that the teacher finds less likely than the label: what it believes wrongly is left out.

    Args:
        alpha: weight of SCD.
        beta: weight of MCD.
        temperature: T.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.

    Raises:
        BadInput: in `build`, two classes.
    """

    search = space(alpha=Log(0.1, 10), beta=Log(0.5, 20), temperature=Log(1, 8))

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 8.0,
        temperature: float = 4.0,
        ce_weight: float = 1.0,
        standardize: bool = False,
    ) -> None:
        super().__init__(temperature, standardize)
        self.alpha = weight("alpha", alpha)
        self.beta = weight("beta", beta)
        self.ce_weight = weight("ce_weight", ce_weight)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Refuse two classes."""
        check_classes(student, "RLD")

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:  # noqa: D102
        assert teacher is not None
        z_s, z_t = (tempered(x, 1.0, self.standardize) for x in (student, teacher))
        own, theirs = split_at_label(z_s, labels), split_at_label(z_t, z_t.argmax(-1))
        confidence = divergence(*(torch.stack(parts[:2], -1) for parts in (theirs, own)))
        lower = z_t < of_label(z_t, labels)[..., None]
        some = lower.any(-1, keepdim=True)
        masked = (F.log_softmax(z.masked_fill(~lower & some, -torch.inf), -1) for z in self.tempered(student, teacher))
        log_s, log_t = (z.where(lower, 0.0) for z in masked)
        correlation = (log_t.exp() * (log_t - log_s)).where(lower, 0.0).sum(-1)
        return {
            "scd": Term(confidence, self.alpha, labelled=True),
            "mcd": Term(correlation, self.beta * self.temperature**2, labelled=True),
            "ce": ce_term(student, labels, self.ce_weight),
        }
