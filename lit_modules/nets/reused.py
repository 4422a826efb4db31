"""A student that predicts by its teacher's classifier (Chen et al. 2022, arXiv:2203.14001)."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput, reason
from lit_modules.nets.base import Net, cast_inputs, conv_norm, evaluating, pipeline_stages
from lit_modules.nets.layers import DEFAULT_LAYER, find_stage, run


class ReusedClassifier(Net):
    """The student's layers up to its last maps, a trained projector, and a copy of the teacher's classifier, frozen.

    The projector has convolutions of 1x1, 3x3 and 1x1, each with BatchNorm and ReLU, half as wide inside as the
    teacher's maps (section 3.2). Maps larger than the teacher's are pooled to their size.

    Args:
        student: a net whose feature layer gives maps (B, C, H, W).
        teacher: a trained net, likewise.
        input_shape: shape of one input.

    Raises:
        BadInput: a net that can't be cut after its feature layer, or whose feature layer gives no maps; maps too small
            for the teacher's classifier.
    """

    feature_layer = "projector"
    stages = ("projector",)
    preactivations = ("projector.8<",)

    def __init__(self, student: nn.Module, teacher: nn.Module, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        example = torch.zeros(2, *input_shape)
        body, _, maps = _cut(student, example, "student")
        _, classifier, teacher_maps = _cut(teacher, example, "teacher")
        size = min(maps[1], teacher_maps[1]), min(maps[2], teacher_maps[2])
        self.body = nn.Sequential(*body, _PoolTo(*size))
        inner, layers = teacher_maps[0] // 2, list[nn.Module]()
        for before, after, side in ((maps[0], inner, 1), (inner, inner, 3), (inner, teacher_maps[0], 1)):
            layers += [*conv_norm(before, after, side), nn.ReLU()]
        self.projector = nn.Sequential(*layers).to(next(student.parameters()))
        self.classifier = copy.deepcopy(nn.Sequential(*classifier)).requires_grad_(False).eval()
        try:
            with torch.no_grad():
                self.classifier(next(teacher.parameters()).new_zeros(2, teacher_maps[0], *size))
        except RuntimeError as error:
            expected = f"one whose classifier takes the student's maps {maps}; it says: {reason(error)}"
            raise BadInput("teacher", type(teacher).__name__, expected) from None

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        logits: Tensor = self.classifier(self.projector(self.body(images)))
        return logits

    def train(self, mode: bool = True) -> "ReusedClassifier":
        super().train(mode)
        self.classifier.eval()
        return self

    def pipeline_stages(self) -> list[nn.Module]:
        return [*self.body, self.projector, *self.classifier]


class _PoolTo(nn.Module):
    """Pools maps of another size; pooling to the same size would be a kernel that is not deterministic on GPUs."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.size = height, width

    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.size) if x.shape[2:] != self.size else x


def _cut(net: nn.Module, example: Tensor, flag: str) -> tuple[list[nn.Module], list[nn.Module], tuple[int, int, int]]:
    """Cut a net after its feature layer; return the modules before and after, and the maps' shape (C, H, W)."""
    modules = pipeline_stages(net, flag)
    number, _ = find_stage(net, modules, DEFAULT_LAYER, flag)
    before, after = modules[: number + 1], modules[number + 1 :]
    inputs = cast_inputs(net, example)
    with evaluating(net):
        output, maps = nn.Sequential(*before)(inputs), run(net, inputs, {DEFAULT_LAYER}).features[DEFAULT_LAYER]
    if not (isinstance(output, Tensor) and output.dim() == 4 and after and torch.equal(output, maps)):
        raise BadInput(flag, type(net).__name__, "a net whose feature layer gives maps, with its classifier after it")
    _, channels, height, width = output.shape
    return before, after, (channels, height, width)
