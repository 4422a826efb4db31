"""Variational information distillation (Ahn et al. 2019, arXiv:1904.05835)."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.stages import MapsObjective, pool_to

FIRST_VARIANCE, EPS = 5.0, 1e-5


class VID(MapsObjective):
    """vid_weight * sum over layers of mean(((m(F_s) - F_t)^2 / v_c + log v_c) / 2) + ce_weight * CE.

    This is the negative log-likelihood of the teacher's map under a Gaussian (equation 4, without its constant), whose
    mean m(F_s) is three trained 1 x 1 convolutions with ReLU between them, and whose variance v_c = softplus(rho_c) +
    1e-5 is trained for each channel c of the teacher, from 5. Convolutions without BatchNorm and bias, the mean over
    channels and positions, and the weight are those of the comparison by Tian et al. 2020 (arXiv:1910.10699).

    Args:
        vid_weight: weight of the negative log-likelihood.
        ce_weight: weight of the cross-entropy with the labels.
        layers: those of StagesObjective; they give maps of any sizes, of which the larger is average-pooled.
    """

    search = space(vid_weight=Log(0.05, 20))

    def __init__(self, vid_weight: float = 1.0, ce_weight: float = 1.0, **layers: Any) -> None:
        super().__init__(**layers)
        self.vid_weight, self.ce_weight = weight("vid_weight", vid_weight), weight("ce_weight", ce_weight)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        super().build(student, teacher)
        pairs = self.pairs(student, teacher)
        self.gaussians = nn.ModuleList(_Gaussian(f_s.shape[1], f_t.shape[1]) for f_s, f_t in pairs)

    def adapt(self, student: Outputs) -> Outputs:
        """Add means (b, C_t, H, W) and variances (b, C_t, 1, 1) for each layer."""
        added = dict[str, Tensor]()
        layers = zip(self.student_layers.values(), self.sizes, self.gaussians, strict=True)
        for number, (path, size, gaussian) in enumerate(layers):
            added[f"mean.{number}"], added[f"variance.{number}"] = gaussian(
                pool_to(self.of_student(student, path), size)
            )
        return student.with_features(added)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        total = torch.zeros(())
        for number, (_, f_t) in enumerate(self.maps(student, teacher)):
            mean, v = student.features[f"mean.{number}"], student.features[f"variance.{number}"]
            total = total + ((mean - f_t).square() / v + v.log()).mean((1, 2, 3)) / 2  # (b,)
        return {"vid": Term(total, self.vid_weight), "ce": ce_term(student, labels, self.ce_weight)}


class _Gaussian(nn.Module):
    """Mean (b, C_t, H, W) and variance (b, C_t, 1, 1) of a teacher's map, given the student's (b, C_s, H, W)."""

    def __init__(self, c_s: int, c_t: int) -> None:
        super().__init__()
        self.mean = nn.Sequential(
            nn.Conv2d(c_s, c_t, 1, bias=False), nn.ReLU(),
            nn.Conv2d(c_t, c_t, 1, bias=False), nn.ReLU(),
            nn.Conv2d(c_t, c_t, 1, bias=False),
        )  # fmt: skip
        self.rho = nn.Parameter(torch.full((c_t,), math.log(math.expm1(FIRST_VARIANCE - EPS))))

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        variance = F.softplus(self.rho) + EPS
        return self.mean(maps), variance.view(1, -1, 1, 1).repeat(len(maps), 1, 1, 1)  # no view: FSDP warns of these
