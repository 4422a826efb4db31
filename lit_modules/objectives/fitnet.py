"""FitNets (Romero et al. 2015, "FitNets: Hints for Thin Deep Nets", arXiv:1412.6550), in one phase."""

from torch import nn

from apprentice.errors import BadInput
from lit_modules.nets.layers import MIDDLE
from lit_modules.objectives.base import Outputs, check_map
from lit_modules.objectives.hint import Hint
from lit_modules.objectives.search import Choice, Log, space


class FitNet(Hint):
    """hint_weight * MSE(regressor(F_s), F_t) + ce_weight * CE, for maps of any sizes (equation 3).

    The regressor is a trained convolution, BatchNorm and ReLU. Its kernel depends on the maps' sizes: 3 x 3 with stride
    2 if the student's are twice the teacher's, transposed 4 x 4 with stride 2 if they are half, otherwise as large as
    the sizes' difference plus one, without padding, transposed if the student's are smaller. This, one phase of
    training (the paper has two), and the weight are those of the comparison by Tian et al. 2020 (arXiv:1910.10699),
    which refuses smaller maps unless half.

    Args:
        hint_weight: weight of the squared difference, a mean over channels and positions.
        ce_weight: weight of the cross-entropy with the labels.
        student_layer: path of the student's layer; by default its middle stage, the second of three or of four, as in
            that comparison.
        teacher_layer: path of the teacher's.

    Raises:
        BadInput: in `build`, a layer gives no maps, or those of one net are higher and less wide than the other's.
    """

    # The paper takes the middle layer of each net; any two layers fit, so each is searched by itself.
    search = space(
        hint_weight=Log(1, 1000), student_layer=Choice((MIDDLE, "stage-1")), teacher_layer=Choice((MIDDLE, "stage-1"))
    )

    def __init__(
        self,
        hint_weight: float = 100.0,
        ce_weight: float = 1.0,
        student_layer: str = MIDDLE,
        teacher_layer: str = MIDDLE,
    ) -> None:
        super().__init__(hint_weight, ce_weight, student_layer=student_layer, teacher_layer=teacher_layer)

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        f_s, f_t = self.maps(student, teacher)
        check_map("student_layer", self.student_layer, f_s, self.grids[0])
        check_map("teacher_layer", self.teacher_layer, f_t, self.grids[1])
        (_, c_s, *size_s), (_, c_t, *size_t) = f_s.shape, f_t.shape
        if not _covers(size_s, size_t) and not _covers(size_t, size_s):
            sizes = f"the student's is {tuple(f_s.shape[1:])}, the teacher's {tuple(f_t.shape[1:])}"
            raise BadInput("student_layer", self.student_layer, f"maps not higher and less wide than others; {sizes}")
        self.regressor = nn.Sequential(_convolution(c_s, c_t, size_s, size_t), nn.BatchNorm2d(c_t), nn.ReLU())


def _covers(size: list[int], other: list[int]) -> bool:
    """Return whether maps of a size are at least as high and as wide as others."""
    return all(a >= b for a, b in zip(size, other, strict=True))


def _convolution(c_s: int, c_t: int, size_s: list[int], size_t: list[int]) -> nn.Module:
    """Build a layer from maps (b, c_s, *size_s) to (b, c_t, *size_t), without bias: BatchNorm would remove it."""
    if size_s == [2 * side for side in size_t]:
        return nn.Conv2d(c_s, c_t, 3, stride=2, padding=1, bias=False)
    if size_t == [2 * side for side in size_s]:
        return nn.ConvTranspose2d(c_s, c_t, 4, stride=2, padding=1, bias=False)
    height, width = (1 + abs(a - b) for a, b in zip(size_s, size_t, strict=True))
    return (nn.Conv2d if _covers(size_s, size_t) else nn.ConvTranspose2d)(c_s, c_t, (height, width), bias=False)
