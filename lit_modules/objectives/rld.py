"""Refined logit distillation (Sun et al. 2025, "Knowledge Distillation with Refined Logits", arXiv:2408.07703)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.objectives.base import Outputs, Term, ce_term, check_temperature, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.logits import LabelObjective, check_warmup, divergence, pick_label, split_at_label
from lit_modules.objectives.search import Log, space


class RLD(LabelObjective):
    """w * (alpha * S^2 * SCD + beta * T^2 * MCD) + ce_weight * CE.

    SCD, at S, is the divergence between the teacher's (max p_t, 1 - max p_t) and the student's (p_s,y, 1 - p_s,y), y
    the label: the student becomes as confident, and right. MCD, at T, is the divergence between the distributions over
    the classes that the teacher finds less likely than the label: its mistakes are left out.

    Args:
        alpha: weight of SCD.
        beta: weight of MCD, for which there have to be three classes or more.
        temperature: T.
        warmup: w rises to 1 over so many epochs, 1 / warmup in the first; 0 for none. The code released with the paper
            has 20, and for ImageNet 1, beta 0.5 or 2, and T 1.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
        scd_temperature: S. 1 is the released code's default; its command for CIFAR-100 sets it to T (`same-t`).
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
        self.scd_temperature = check_temperature(scd_temperature)
        self.alpha, self.beta = weight("alpha", alpha), weight("beta", beta)
        self.ce_weight, self.warmup = weight("ce_weight", ce_weight), check_warmup(warmup)

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        z_s, z_t = self.temper(student, teacher, self.scd_temperature)
        splits = split_at_label(z_t, z_t.argmax(-1)), split_at_label(z_s, labels)
        confidence = divergence(*(torch.stack(split[:2], -1) for split in splits))
        lower = z_t < pick_label(z_t, labels)[..., None]
        excluded = ~lower & lower.any(-1, keepdim=True)
        log_s, log_t = (
            F.log_softmax(z.masked_fill(excluded, -torch.inf), -1).where(lower, 0.0)
            for z in self.temper(student, teacher)
        )
        correlation = (log_t.exp() * (log_t - log_s)).where(lower, 0.0).sum(-1)
        share = self.warmup_share(context.epoch)
        return {
            "scd": Term(confidence, share * self.alpha * self.scd_temperature**2, labelled=True),
            "mcd": Term(correlation, share * self.beta * self.temperature**2, labelled=True),
            "ce": ce_term(student, labels, self.ce_weight),
        }
