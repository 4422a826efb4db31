"""Decoupled knowledge distillation (Zhao et al. 2022, arXiv:2203.08679)."""

import torch
from torch import Tensor

from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.logits import LabelObjective, check_warmup, divergence, split_at_label
from lit_modules.objectives.search import Log, space


class DKD(LabelObjective):
    """w * T^2 * (alpha * TCKD + beta * NCKD) + ce_weight * CE.

    TCKD is the divergence between the teacher's and the student's (p_y, 1 - p_y), y the label; NCKD that between their
    distributions over the other classes. Hinton's divergence is TCKD + (1 - p_y) NCKD with the teacher's p_y. The code
    released with the paper chooses beta for each pair of nets: 2 for ResNet-20 and 32, 6 for the students of VGG-13 and
    WRN students, 8 for the others.

    Args:
        alpha: weight of TCKD.
        beta: weight of NCKD, for which there have to be three classes or more.
        temperature: T.
        warmup: w rises to 1 over so many epochs, 1 / warmup in the first; 0 for none. As in the code released with the
            paper.
        ce_weight: weight of the cross-entropy with the labels.
        standardize: that of LogitObjective.
    """

    # The paper's beta is 2 to 8, by the student, at a temperature of 4.
    search = space(beta=Log(0.5, 20), temperature=Log(1, 8))

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 8.0,
        temperature: float = 4.0,
        warmup: int = 20,
        ce_weight: float = 1.0,
        standardize: bool = False,
    ) -> None:
        super().__init__(temperature, standardize)
        self.alpha, self.beta = weight("alpha", alpha), weight("beta", beta)
        self.ce_weight, self.warmup = weight("ce_weight", ce_weight), check_warmup(warmup)

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        student_split, teacher_split = (split_at_label(z, labels) for z in self.temper(student, teacher))
        target = divergence(*(torch.stack(split[:2], -1) for split in (teacher_split, student_split)))
        # Both logarithms of the label's class are 0, so that their difference counts nothing.
        others = divergence(teacher_split[2], student_split[2])
        scale = self.warmup_share(context.epoch) * self.temperature**2
        return {
            "tckd": Term(target, scale * self.alpha, labelled=True),
            "nckd": Term(others, scale * self.beta, labelled=True),
            "ce": ce_term(student, labels, self.ce_weight),
        }
