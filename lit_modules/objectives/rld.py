"""Refined logit distillation (Sun et al. 2025, "Knowledge Distillation with Refined Logits", arXiv:2408.07703)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Term, checked_temperature, weight
from lit_modules.objectives.cross_entropy import ce_term
from lit_modules.objectives.logits import (
    LogitObjective,
    check_classes,
    checked_warmup,
    divergence,
    of_label,
    split_at_label,
    tempered,
    whole_epochs_share,
)
from lit_modules.objectives.search import Log, space


class RLD(LogitObjective):
    """w * (alpha * S^2 * SCD + beta * T^2 * MCD) + ce_weight * CE.

    SCD, at S, is the divergence between the teacher's (max p_t, 1 - max p_t) and the student's (p_s,y, 1 - p_s,y), y
    the label: the student becomes as confident, and right. MCD, at T, is that between the distributions over the
    classes that the teacher finds less likely than the label: what it believes wrongly is left out.

    Args:
        alpha: weight of SCD.
        beta: weight of MCD.
        temperature: T.
        warmup: w rises to 1 over so many epochs, 1 / warmup in the first; 0 for none. The code released with the paper
            has 20, and for ImageNet 1, beta 0.5 or 2, and T 1.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
        scd_temperature: S. 1 is the released code's default; its command for CIFAR-100 sets it to T (`--same-t`).

    Raises:
        BadInput: in `build`, two classes.
    """

    search = space(alpha=Log(0.1, 10), beta=Log(0.5, 20), temperature=Log(1, 8))

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 8.0,
        temperature: float = 4.0,
        warmup: int = 20,
        ce_weight: float = 1.0,
        standardize: bool = False,
        scd_temperature: float = 1.0,
    ) -> None:
        super().__init__(temperature, standardize)
        self.scd_temperature = checked_temperature(scd_temperature)
        self.alpha = weight("alpha", alpha)
        self.beta = weight("beta", beta)
        self.ce_weight = weight("ce_weight", ce_weight)
        self.warmup = checked_warmup(warmup)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        """Refuse two classes."""
        super().build(student, teacher)
        check_classes(student, "RLD")

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:  # noqa: D102
        assert teacher is not None
        z_s, z_t = (tempered(x, self.scd_temperature, self.standardize) for x in (student, teacher))
        own, theirs = split_at_label(z_s, labels), split_at_label(z_t, z_t.argmax(-1))
        confidence = divergence(*(torch.stack(parts[:2], -1) for parts in (theirs, own)))
        lower = z_t < of_label(z_t, labels)[..., None]
        some = lower.any(-1, keepdim=True)
        masked = (F.log_softmax(z.masked_fill(~lower & some, -torch.inf), -1) for z in self.tempered(student, teacher))
        log_s, log_t = (z.where(lower, 0.0) for z in masked)
        correlation = (log_t.exp() * (log_t - log_s)).where(lower, 0.0).sum(-1)
        share = whole_epochs_share(self.place.epoch, self.warmup)
        return {
            "scd": Term(confidence, share * self.alpha * self.scd_temperature**2, labelled=True),
            "mcd": Term(correlation, share * self.beta * self.temperature**2, labelled=True),
            "ce": ce_term(student, labels, self.ce_weight),
        }
