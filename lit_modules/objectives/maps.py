"""The base class of objectives that compare maps (b, C, H, W)."""

from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import widen
from lit_modules.objectives.stages import StagesObjective

Size = tuple[int, int]  # (H, W)


class MapsObjective(StagesObjective):
    """Compares maps (b, C, H, W) of several layers; of each pair the larger is average-pooled to the smaller.

    The teacher's maps pass `of_teacher` before they are stored.

    Attributes:
        sizes: (H, W) of the smaller map of each pair, set by `build`.

    Raises:
        BadInput: in `build`, a layer gives no maps.
    """

    def build(self, student: Outputs, teacher: Outputs | None) -> None:  # noqa: D102
        for layers, outputs in ((self.student_layers, student), (self.teacher_layers, teacher)):
            for option, path in layers.items():
                assert outputs is not None
                check_map(option, path, outputs.features[path])
        self.sizes = [smaller_size(f_s, f_t) for f_s, f_t in super().pairs(student, teacher)]

    def check_positions(self) -> None:
        """Raise BadInput if all maps have one position: divided by its length, it is the same for all samples."""
        if all(size == (1, 1) for size in self.sizes):
            paths = ", ".join(self.student_layers.values())
            expected = "layers of which one at least gives maps larger than 1 x 1, whose attention is constant"
            raise BadInput("student_stages", f"[{paths}]", expected)

    def of_teacher(self, maps: Tensor) -> Tensor:
        """Return what is compared of a teacher's maps (b, C, H, W), without parameters."""
        return maps

    def condense(self, teacher: Outputs) -> Outputs:
        """Reduce the teacher's maps to what is compared, as `condensed.<number>` where it differs from the layer's."""
        features = dict[str, Tensor]()
        for number, (path, size) in enumerate(zip(self.teacher_layers.values(), self.sizes, strict=True)):
            raw = teacher.features[path]
            reduced = self.of_teacher(pool_to(raw, size))
            features[path if reduced is raw else f"condensed.{number}"] = reduced
        return teacher._replace(features=features)

    def pairs(self, student: Outputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
        """Return for each pair of layers the student's maps, pooled if larger, and the teacher's, reduced."""
        assert teacher is not None
        layers = zip(self.student_layers.values(), self.teacher_layers.values(), self.sizes, strict=True)
        pairs = []
        for number, (path_s, path_t, size) in enumerate(layers):
            reduced = f"condensed.{number}"
            f_t = teacher.features[reduced if reduced in teacher.features else path_t]
            pairs.append((pool_to(student.features[path_s], size), f_t))
        return pairs


def check_map(option: str, path: str, x: Tensor) -> None:
    """Raise BadInput if a layer's output x is no map (b, C, H, W)."""
    if x.dim() != 4:
        raise BadInput(option, path, f"a layer that gives maps (C, H, W); its output is {tuple(x.shape[1:])}")


def smaller_size(f_s: Tensor, f_t: Tensor) -> Size:
    """Return the smaller height and the smaller width of two maps."""
    return min(f_s.shape[2], f_t.shape[2]), min(f_s.shape[3], f_t.shape[3])


def pool_to(x: Tensor, size: Size) -> Tensor:
    """Average maps (b, C, H, W) to (b, C, *size); return the same tensor if they have this size."""
    height, width = x.shape[2:]
    if (height, width) == size:
        return x
    if height % size[0] or width % size[1]:
        return F.adaptive_avg_pool2d(widen(x), size)
    return F.avg_pool2d(widen(x), (height // size[0], width // size[1]))  # its gradient has the same bits on GPUs too
