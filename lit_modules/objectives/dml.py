"""Deep mutual learning (Zhang et al. 2018, arXiv:1706.00384)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.objectives.base import Objective, Outputs, Term, ce_term, kl, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.search import Log, space


class DML(Objective):
    """mutual_weight * mean over peers j of KL(softmax(z_j) || softmax(z_s)) + ce_weight * CE, without a teacher.

    Peers are students trained beside this one, each with its own objective; those that name each other are a cohort.
    All learn from the same batch at the same time, while the paper's take turns. Members of one class need different
    initial weights, or they stay equal; `kd.py` draws these from seed and name.

    Args:
        peers: names of the students to learn from.
        mutual_weight: weight of the divergence from the peers.
        ce_weight: weight of the cross-entropy with the labels.
    """

    search = space(mutual_weight=Log(0.1, 10))
    uses_teacher = False

    def __init__(self, peers: list[str], mutual_weight: float = 1.0, ce_weight: float = 1.0) -> None:
        super().__init__()
        if not peers or len({*peers}) < len(peers):
            raise BadInput("peers", peers, "names of one student or more, each once")
        self.peers = peers
        self.mutual_weight, self.ce_weight = weight("mutual_weight", mutual_weight), weight("ce_weight", ce_weight)

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        log_s = F.log_softmax(student.logits, -1)
        divergences = [kl(F.log_softmax(context.peers[peer].logits, -1), log_s) for peer in self.peers]
        mutual = Term(torch.stack(divergences).mean(0), self.mutual_weight)
        return {"mutual": mutual, "ce": ce_term(student, labels, self.ce_weight)}
