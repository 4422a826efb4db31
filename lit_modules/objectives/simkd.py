"""Knowledge distillation with the reused teacher classifier (Chen et al. 2022, arXiv:2203.14001)."""

from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.reused import ReusedClassifier
from lit_modules.objectives.base import FeatureObjective, Outputs, Term


class SimKD(FeatureObjective):
    """MSE(projector(F_s), F_t) alone, without labels; predicts by the teacher's classifier (equation 3).

    The student's net becomes a `ReusedClassifier`, which is exported: its own layers up to the last maps, a projector,
    and the teacher's classifier, frozen. The mean is over channels and positions. The teacher's maps, if larger, are
    pooled to the student's size.

    Raises:
        BadInput: in `wrap`, a net that can't be cut after maps, or whose maps don't fit.
    """

    def __init__(self) -> None:
        super().__init__()

    def wrap(self, net: nn.Module, teacher: nn.Module, example: Tensor) -> nn.Module:
        try:
            return ReusedClassifier(net, teacher, tuple(example.shape[1:]))
        except BadInput as fault:
            raise BadInput("", "SimKD", f"as {fault.argument} {fault.expected}; it is {fault.value}") from None

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        f_s, f_t = self.features(student, teacher)
        if f_t.shape[2:] != f_s.shape[2:]:
            f_t = F.adaptive_avg_pool2d(f_t, (f_s.shape[2], f_s.shape[3]))
        return {"maps": Term((f_s - f_t).square().mean((1, 2, 3)), 1.0)}
