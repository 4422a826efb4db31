"""Relational knowledge distillation (Park et al. 2019, arXiv:1904.05068)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.objectives.base import Outputs, Term, weight
from lit_modules.objectives.embeddings import RelationObjective
from lit_modules.objectives.search import Log, space

SAME = 1e-6  # distance below which two embeddings have no direction between them


class RKD(RelationObjective):
    """distance_weight * distances + angle_weight * angles + ce_weight * CE, of all pairs and triples of a global batch.

    Distances: the Huber loss between |e_i - e_j| of student and teacher, each divided by its mean over the B (B - 1)
    pairs of different samples, equal embeddings among them (equation 4). Angles: that between the cosines of the angles
    at sample i of the triangle with j and k. The losses are means over all pairs (i, j) and triples (i, j, k), i = j
    among them, as in the code released with the paper. The weights are those of the comparison by Tian et al. 2020
    (arXiv:1910.10699); the released code's for metric learning are 1 and 2.

    Memory and time of the angles grow with the cube of the batch.

    Args:
        distance_weight: weight of the distances.
        angle_weight: weight of the angles; 0 does not compute them.
        ce_weight: weight of the cross-entropy with the labels.
        layers: those of RelationObjective.
    """

    fewest_related = 3  # the distance of two rows is its own mean, and they have no angle
    search = space(distance_weight=Log(2.5, 250), angle_weight=Log(5, 500))

    def __init__(
        self, distance_weight: float = 25.0, angle_weight: float = 50.0, ce_weight: float = 1.0, **layers: Any
    ) -> None:
        super().__init__(**layers)
        self.distance_weight = weight("distance_weight", distance_weight)
        self.angle_weight = weight("angle_weight", angle_weight)
        self.ce_weight = weight("ce_weight", ce_weight)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        if self.angle_weight:
            self.check_directions(student, "angle_weight", self.angle_weight, "0")

    def relations(self, e_s: Tensor, e_t: Tensor) -> dict[str, Term]:
        distances = F.smooth_l1_loss(_distances(e_s), _distances(e_t), reduction="none").mean(1)
        terms = {"distance": Term(distances, self.distance_weight)}
        if self.angle_weight:
            angles = F.smooth_l1_loss(_angles(e_s), _angles(e_t), reduction="none").mean((1, 2))
            terms["angle"] = Term(angles, self.angle_weight)
        return terms


def _distances(e: Tensor) -> Tensor:
    """Return (B, B), distances of the rows of e (B, d) over their mean without the diagonal; 0 if rows are equal."""
    squares = (e[:, None] - e).square().sum(-1)  # products of e with itself would lose digits far from zero
    near = squares < SAME**2
    distances = squares.where(~near, 1.0).sqrt().where(~near, 0.0)
    mean = distances.sum() / max(len(e) * (len(e) - 1), 1)
    return distances / mean.where(~near.all(), 1.0)


def _angles(e: Tensor) -> Tensor:
    """Return (B, B, B), cosines at row i of the angle between rows j and k of e (B, d); 0 where one is row i."""
    difference = e - e[:, None]  # of j from i, (B, B, d)
    squares = difference.square().sum(-1, keepdim=True)
    near = squares < SAME**2
    directions = (difference / squares.where(~near, 1.0).sqrt()).where(~near, 0.0)
    return torch.bmm(directions, directions.mT)
