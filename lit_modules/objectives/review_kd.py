"""Knowledge review (Chen et al. 2021, "Distilling Knowledge via Knowledge Review", arXiv:2104.09044)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.nets.layers import resolve
from lit_modules.objectives.base import Outputs, Term, ce_term, weight
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.search import Log, space
from lit_modules.objectives.stages import Size, StagesObjective, number_layers, pool_to

POOLS = (4, 2, 1)  # heights and widths of HCL's coarser maps
WIDEST = 512  # channels of fused maps


class ReviewKD(StagesObjective):
    """review_weight * min(epoch / warmup_epochs, 1) * sum over levels of HCL(fused F_s, F_t) + ce_weight * CE.

    From the deepest level to the first, attention-based fusion (ABF, section 3.3) joins a student's map with what the
    deeper levels gave, upsampled, and makes a map of the teacher's size. The hierarchical context loss HCL compares it
    with the teacher's: mean squared differences of the maps and of their averages in 4 x 4, 2 x 2 and 1 x 1 cells, with
    weights 1, 1/2, 1/4 and 1/8 over their sum; grids as large as the map are left out. Levels are the stages, the
    teacher's before their last ReLU where there is one, and the pooled vector, as in the code released with the paper.
    Its weight differs by pair of nets: 5 for WRN and resnet8x4, 8 for ShuffleNetV2, 0.6 for ResNet-20, 1 for ResNet-32.
    It trains in batches of 128 with Nesterov's momentum and a rate of 0.1 (0.02 for small nets), and its weight grows
    by whole epochs, ours within them, too.

    Args:
        review_weight: weight of the levels' differences.
        ce_weight: weight of the cross-entropy with the labels.
        warmup_epochs: epochs in which the weight of the levels grows from 0; 0 for none.
        layers: those of StagesObjective, from the first to the deepest level, which give maps of any sizes or vectors.
    """

    # The paper's weights are 0.6 to 8, by the pair of nets.
    search = space(review_weight=Log(0.1, 10))

    def __init__(
        self, review_weight: float = 1.0, ce_weight: float = 1.0, warmup_epochs: float = 20.0, **layers: Any
    ) -> None:
        super().__init__(**layers)
        self.review_weight, self.ce_weight = weight("review_weight", review_weight), weight("ce_weight", ce_weight)
        self.warmup_epochs = weight("warmup_epochs", warmup_epochs)

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        """Choose all stages that both nets have, the teacher's before ReLU, and the pooled vectors, unless set."""
        super().choose(student, teacher)
        student_paths, teacher_paths = list(self.student_layers.values()), list(self.teacher_layers.values())
        if not self.stages["teacher_stages"]:
            teacher_paths = [f"{path}.pre" if resolve(teacher, f"{path}.pre") else path for path in teacher_paths]
        if not any(self.stages.values()) and all(resolve(net, "pooled") for net in (student, teacher)):
            student_paths, teacher_paths = [*student_paths, "pooled"], [*teacher_paths, "pooled"]
        self.student_layers = number_layers("student_stages", student_paths)
        self.teacher_layers = number_layers("teacher_stages", teacher_paths)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        self.check_maps(student, teacher, with_vectors=True)
        pairs = [(_as_map(f_s), _as_map(f_t)) for f_s, f_t in self.pairs(student, teacher)]
        self.sizes = [(f_t.shape[2], f_t.shape[3]) for _, f_t in pairs]
        width, deepest = min(WIDEST, pairs[-1][0].shape[1]), len(pairs) - 1
        self.fusions = nn.ModuleList(
            _Fusion(f_s.shape[1], width, f_t.shape[1], number < deepest) for number, (f_s, f_t) in enumerate(pairs)
        )

    def adapt(self, student: Outputs) -> Outputs:
        """Add for each level a map of the teacher's shape, as `fused.<number>`."""
        fused, deeper = dict[str, Tensor](), None
        for number, path in reversed(list(enumerate(self.student_layers.values()))):
            x = _as_map(self.of_student(student, path))
            fused[f"fused.{number}"], deeper = self.fusions[number](x, deeper, self.sizes[number])
        return student.with_features(fused)

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        total = torch.zeros(())
        for number, (_, f_t) in enumerate(self.pairs(student, teacher)):
            total = total + _hcl(student.features[f"fused.{number}"], _as_map(f_t))
        ramp = min(context.epoch / self.warmup_epochs, 1.0) if self.warmup_epochs else 1.0
        review = Term(total, self.review_weight * ramp)
        return {"review": review, "ce": ce_term(student, labels, self.ce_weight)}


class _Fusion(nn.Module):
    """ABF: joins a level's map (b, C_s, H, W) with that of the deeper levels.

    Returns the joint map (b, C_t, *size), and the map before the last convolution, (b, width, *size), for the level
    above.
    """

    def __init__(self, c_s: int, width: int, c_t: int, joins: bool) -> None:
        super().__init__()
        one, three = nn.Conv2d(c_s, width, 1, bias=False), nn.Conv2d(width, c_t, 3, padding=1, bias=False)
        for convolution in (one, three):
            nn.init.kaiming_uniform_(convolution.weight, a=1)
        self.first = nn.Sequential(one, nn.BatchNorm2d(width))
        self.attention = nn.Sequential(nn.Conv2d(2 * width, 2, 1), nn.Sigmoid()) if joins else None
        self.last = nn.Sequential(three, nn.BatchNorm2d(c_t))

    def forward(self, x: Tensor, deeper: Tensor | None, size: Size) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        if self.attention is not None and deeper is not None:
            deeper = _nearest(deeper, (x.shape[2], x.shape[3]))
            share_x, share_deeper = self.attention(torch.cat([x, deeper], 1)).split(1, 1)  # each (b, 1, H, W)
            x = x * share_x + deeper * share_deeper
        x = _nearest(x, size)
        return self.last(x), x


def _as_map(x: Tensor) -> Tensor:
    return x[:, :, None, None] if x.dim() == 2 else x


def _nearest(x: Tensor, size: Size) -> Tensor:
    return x if x.shape[2:] == size else F.interpolate(x, size)


def _hcl(f_s: Tensor, f_t: Tensor) -> Tensor:
    """Return HCL (b,) of maps (b, C, H, W)."""
    loss, share, shares = (f_s - f_t).square().mean((1, 2, 3)), 1.0, 1.0
    for side in [side for side in POOLS if side < min(f_t.shape[2:])]:
        share /= 2
        shares += share
        loss = loss + share * pool_to(f_s - f_t, (side, side)).square().mean((1, 2, 3))
    return loss / shares
