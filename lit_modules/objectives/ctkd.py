"""Curriculum temperature (Li et al. 2023, arXiv:2211.16231), the same for all samples."""

import math

import torch
from torch import Tensor, nn

from lit_modules.objectives.base import Outputs, Term, ce_term, kl, positive, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.logits import LogitObjective
from lit_modules.objectives.search import Log, space

LEAST, RANGE, FIRST = 1.0, 20.0, 1.0  # T = LEAST + RANGE * sigmoid(theta), theta = FIRST at first: T is 15.6


class CTKD(LogitObjective):
    """kd_weight * T^2 * KL(p_t || p_s) + ce_weight * CE, both p at a T that is trained to make the divergence larger.

    T = 1 + 20 sigmoid(theta). theta gets the loss's gradient times -lambda, which grows from 0 to 1 in `warmup_epochs`
    as (1 - cos(pi * epoch / warmup_epochs)) / 2: the student's task becomes harder. The weights are those that Tian et
    al. 2020 (arXiv:1910.10699) have for Hinton's method. The code released with the paper counts whole epochs from 1,
    so that lambda is 0.02 in the first; ours grows within epochs, from 0.

    Args:
        kd_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        warmup_epochs: epochs in which lambda grows.
        standardize: that of LogitObjective.
    """

    search = space(kd_weight=Log(0.1, 10))

    def __init__(
        self, kd_weight: float = 0.9, ce_weight: float = 0.1, warmup_epochs: float = 10.0, standardize: bool = False
    ) -> None:
        super().__init__(standardize=standardize)
        self.kd_weight, self.ce_weight = weight("kd_weight", kd_weight), weight("ce_weight", ce_weight)
        self.warmup_epochs = positive("warmup_epochs", warmup_epochs)
        self.curriculum = _Temperature()

    def adapt(self, student: Outputs) -> Outputs:
        """Add T (b,) to the student's outputs."""
        return student.with_features({"temperature": self.curriculum(len(student.logits))})

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        t = student.features["temperature"]
        reversal = (1 - math.cos(math.pi * min(context.epoch / self.warmup_epochs, 1.0))) / 2  # lambda
        t = (1 + reversal) * t.detach() - reversal * t  # T, with its gradient reversed
        log_s, log_t = self.log_probabilities(student, teacher, t)
        soft = kl(log_t, log_s)
        return {
            "kd": Term(soft * t.square().view(-1, *[1] * (soft.dim() - 1)), self.kd_weight),
            "ce": ce_term(student, labels, self.ce_weight),
        }


class _Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((1,), FIRST))  # FSDP shards no scalar

    def forward(self, rows: int) -> Tensor:
        return (LEAST + RANGE * self.theta.sigmoid()).repeat(rows)  # no view: FSDP warns of these
