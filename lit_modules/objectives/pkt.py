"""Probabilistic knowledge transfer (Passalis and Tefas 2018, arXiv:1803.10837)."""

from typing import Any

from torch import Tensor

from lit_modules.objectives.base import Outputs, Term, weight
from lit_modules.objectives.embeddings import RelationObjective
from lit_modules.objectives.search import Log, space

EPS = 1e-7


class PKT(RelationObjective):
    """pkt_weight * sum over j of P_t log(P_t / P_s) / B + ce_weight * CE, P_ij the similarity of samples i and j.

    P is (cos(e_i, e_j) + 1) / 2, divided by its sum over j, the samples of the global batch, i among them. As in the
    code released with the paper, the divergence is a mean over pairs, B times less than over samples; hence the weight,
    that of the comparison by Tian et al. 2020 (arXiv:1910.10699).

    Args:
        pkt_weight: weight of the divergence.
        ce_weight: weight of the cross-entropy with the labels.
        layers: those of RelationObjective.
    """

    search = space(pkt_weight=Log(300, 300_000))

    def __init__(self, pkt_weight: float = 30000.0, ce_weight: float = 1.0, **layers: Any) -> None:
        super().__init__(**layers)
        self.pkt_weight, self.ce_weight = weight("pkt_weight", pkt_weight), weight("ce_weight", ce_weight)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        self.check_directions(student, "student_layer", self.student_layer, "a layer of more values")

    def relations(self, e_s: Tensor, e_t: Tensor) -> dict[str, Term]:
        p_s, p_t = (_similarities(e) for e in (e_s, e_t))
        return {"pkt": Term((p_t * ((p_t + EPS) / (p_s + EPS)).log()).mean(1), self.pkt_weight)}


def _similarities(e: Tensor) -> Tensor:
    """Return the similarities (B, B) of the rows of e (B, d); each row sums to 1."""
    squares = e.square().sum(1, keepdim=True)
    lengths = squares.where(squares > 0, 1.0).sqrt().where(squares > 0, 0.0)
    a = e / (lengths + EPS)
    similarities = (a @ a.T + 1) / 2
    return similarities / similarities.sum(1, keepdim=True)
