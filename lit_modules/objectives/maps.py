"""What objectives share that compare maps (b, C, H, W)."""

from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import widened
from lit_modules.objectives.stages import StagesObjective

Size = tuple[int, int]  # (H, W)


class MapsObjective(StagesObjective):
    """Compares maps (b, C, H, W) of several layers; of each pair the larger is average-pooled to the smaller.

    The teacher's maps pass `of_teacher` before they are stored.

    Attributes:
        sizes: (H, W) of each pair's smaller map, known after `build`.

    Raises:
        BadInput: in `build`, a layer gives no maps.
    """

    def build(self, student: Outputs, teacher: Outputs | None) -> None:  # noqa: D102
        for layers, outputs in ((self.student_layers, student), (self.teacher_layers, teacher)):
            for option, path in layers.items():
                assert outputs is not None
                check_map(option, path, outputs.features[path])
        self.sizes = [smaller(f_s, f_t) for f_s, f_t in super().pairs(student, teacher)]

    def check_positions(self) -> None:
        """Raise BadInput if all maps have one position: divided by its length, it is the same for all samples."""
        if all(size == (1, 1) for size in self.sizes):
            paths = ", ".join(self.student_layers.values())
            expected = "layers of which one at least gives maps larger than 1 x 1, whose attention is constant"
            raise BadInput("student_stages", f"[{paths}]", expected)

    def of_teacher(self, maps: Tensor) -> Tensor:
        """What is compared of a teacher's maps (b, C, H, W), without parameters."""
        return maps

    def condense(self, teacher: Outputs) -> Outputs:
        """The teacher's outputs, with what is compared as `condensed.<number>` where it differs from the layer's."""
        features = dict[str, Tensor]()
        for number, (path, size) in enumerate(zip(self.teacher_layers.values(), self.sizes, strict=True)):
            raw = teacher.features[path]
            found = self.of_teacher(pooled(raw, size))
            features[path if found is raw else f"condensed.{number}"] = found
        return teacher._replace(features=features)

    def pairs(self, student: Outputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
        """Of each pair of layers, the student's maps, pooled if larger, and what is compared of the teacher's."""
        assert teacher is not None
        paths = zip(self.student_layers.values(), self.teacher_layers.values(), self.sizes, strict=True)
        known = teacher.features
        names = [f"condensed.{number}" for number in range(len(self.sizes))]
        return [
            (pooled(student.features[own], size), known[name if name in known else other])
            for name, (own, other, size) in zip(names, paths, strict=True)
        ]


def check_map(option: str, path: str, x: Tensor) -> None:
    """Raise BadInput if a layer's output x is no map (b, C, H, W)."""
    if x.dim() != 4:
        raise BadInput(option, path, f"a layer that gives maps (C, H, W); its output is {tuple(x.shape[1:])}")


def smaller(f_s: Tensor, f_t: Tensor) -> Size:
    """The smaller height and the smaller width of two maps."""
    return min(f_s.shape[2], f_t.shape[2]), min(f_s.shape[3], f_t.shape[3])


def pooled(x: Tensor, size: Size) -> Tensor:
    """Maps (b, C, H, W) averaged to (b, C, *size); the same tensor if they have this size."""
    height, width = x.shape[2:]
    if (height, width) == size:
        return x
    if height % size[0] or width % size[1]:
        return F.adaptive_avg_pool2d(widened(x), size)
    return F.avg_pool2d(widened(x), (height // size[0], width // size[1]))  # its gradient has the same bits on GPUs too
