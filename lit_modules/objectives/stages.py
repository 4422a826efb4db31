"""The base classes of objectives that compare several layers, such as maps (b, C, H, W)."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.base import Net
from lit_modules.nets.tokens import as_maps, token_grid
from lit_modules.objectives.base import Grids, Objective, Outputs, check_map, widen

Size = tuple[int, int]  # (H, W)


class StagesObjective(Objective):
    """An objective that compares several layers of the student with as many of the teacher, tokens of patches as maps.

    Args:
        student_stages: the student's layers; default: all stages that both nets have, counted from the last.
        teacher_stages: the teacher's layers.
    """

    grids: Grids = (None, None)  # set by `choose`

    def __init__(self, student_stages: list[str] | None = None, teacher_stages: list[str] | None = None) -> None:
        super().__init__()
        self.stages = {"student_stages": student_stages, "teacher_stages": teacher_stages}
        counts = {option: len(paths) for option, paths in self.stages.items() if paths is not None}
        for option, count in counts.items():
            if not count or {*counts.values()} != {count}:
                raise BadInput(option, self.stages[option], "names of layers, as many of the student as of the teacher")

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        """Choose all stages that both nets have, unless the options name layers."""
        nets = {"student_stages": student, "teacher_stages": teacher}
        self.grids = token_grid(student), token_grid(teacher)
        available = {option: self.stages[option] or getattr(net, "stages", ()) for option, net in nets.items()}
        for option, net in nets.items():
            if not available[option]:
                raise BadInput(option, None, f"names of layers, as {type(net).__name__} names no stages")
        last = [f"stage{number}" for number in range(-min(map(len, available.values())), 0)]
        layers = {option: self.stages[option] or last for option in nets}
        for option, paths in layers.items():
            if len(paths) != len(last):
                expected = f"{len(last)} layers, as the other net has so many stages, or that net's layers by name too"
                raise BadInput(option, paths, expected)
        self.student_layers, self.teacher_layers = (number_layers(option, paths) for option, paths in layers.items())

    def pairs(self, student: Outputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
        """Return the outputs of each pair of layers, the student's first."""
        assert teacher is not None
        paths = zip(self.student_layers.values(), self.teacher_layers.values(), strict=True)
        return [(self.of_student(student, path_s), self.of_teacher(teacher, path_t)) for path_s, path_t in paths]

    def of_student(self, student: Outputs, path: str) -> Tensor:
        """Return a layer's output, tokens of patches as maps."""
        return as_maps(student.features[path], self.grids[0])

    def of_teacher(self, teacher: Outputs, path: str) -> Tensor:
        return as_maps(teacher.features[path], self.grids[1])

    def check_maps(self, student: Outputs, teacher: Outputs | None, with_vectors: bool = False) -> None:
        """Raise BadInput if a layer gives no maps; `with_vectors` (b, D) count as such."""
        sides = (self.student_layers, self.of_student, student), (self.teacher_layers, self.of_teacher, teacher)
        for (layers, read, outputs), grid in zip(sides, self.grids, strict=True):
            for option, path in layers.items():
                assert outputs is not None
                x = read(outputs, path)
                if not (with_vectors and x.dim() == 2):
                    check_map(option, path, x, grid)


class MapsObjective(StagesObjective):
    """Compares maps (b, C, H, W) of several layers; of each pair the larger is average-pooled to the smaller.

    The teacher's maps pass `reduce` before they are stored. `sizes`, set by `build`, are (H, W) of each pair's
    smaller map. BadInput, in `build`, if a layer gives no maps.
    """

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        self.check_maps(student, teacher)
        shapes = [(f_s.shape, f_t.shape) for f_s, f_t in self.pairs(student, teacher)]
        self.sizes = [(min(s[2], t[2]), min(s[3], t[3])) for s, t in shapes]

    def check_positions(self) -> None:
        """Raise BadInput if all maps have one position: divided by its length, it is the same for all samples."""
        if all(size == (1, 1) for size in self.sizes):
            paths = ", ".join(self.student_layers.values())
            expected = "layers of which one at least gives maps larger than 1 x 1, whose attention is constant"
            raise BadInput("student_stages", f"[{paths}]", expected)

    def reduce(self, maps: Tensor) -> Tensor:
        """Return what is compared of maps (b, C, H, W), without parameters; of the teacher's it is stored."""
        return maps

    def condense(self, teacher: Outputs) -> Outputs:
        """Reduce the teacher's maps to what is compared, as `condensed.<number>` where it differs from the layer's."""
        features = dict[str, Tensor]()
        for number, (path, size) in enumerate(zip(self.teacher_layers.values(), self.sizes, strict=True)):
            raw = teacher.features[path]
            reduced = self.reduce(pool_to(as_maps(raw, self.grids[1]), size))
            features[path if reduced is raw else f"condensed.{number}"] = reduced
        return teacher._replace(features=features)

    def maps(self, student: Outputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
        """Return for each pair of layers the student's maps, pooled if larger, and the teacher's, reduced."""
        assert teacher is not None
        layers = zip(self.student_layers.values(), self.teacher_layers.values(), self.sizes, strict=True)
        pairs = []
        for number, (path_s, path_t, size) in enumerate(layers):
            reduced = f"condensed.{number}"
            f_t = teacher.features[reduced if reduced in teacher.features else path_t]
            pairs.append((pool_to(self.of_student(student, path_s), size), f_t))
        return pairs


def number_layers(option: str, paths: Sequence[str]) -> dict[str, str]:
    """Return paths by `<option>.<number>`."""
    return {f"{option}.{number}": path for number, path in enumerate(paths)}


def map_blocks(objective: StagesObjective, student: nn.Module, teacher: nn.Module) -> None:
    """Let each block of the student learn from one of the teacher, unless the options name layers."""
    ours, theirs = (len(getattr(net, "stages", ())) for net in (student, teacher))
    if any(objective.stages.values()) or theirs < ours:
        return
    paths = [f"stage{number}" for number in match_blocks(student, ours, theirs)]
    objective.teacher_layers = number_layers("teacher_stages", paths)


def match_blocks(student: nn.Module, ours: int, theirs: int) -> list[int]:
    """Return the block of the teacher, from 1, that each of the student's blocks learns from.

    A student that keeps some of the teacher's blocks (`Pruned`) learns from what the next one that it keeps reads in
    the teacher. Any other's block m of M learns from block m N / M of N.
    """
    kept = student.kept_blocks if isinstance(student, Net) else ()
    return [*kept[1:], theirs] if kept else [(m + 1) * theirs // ours for m in range(ours)]


def pool_to(x: Tensor, size: Size) -> Tensor:
    """Average maps (b, C, H, W) to (b, C, *size); return the same tensor if they have this size."""
    height, width = x.shape[2:]
    if (height, width) == size:
        return x
    if height % size[0] or width % size[1]:
        return F.adaptive_avg_pool2d(widen(x), size)
    return F.avg_pool2d(widen(x), (height // size[0], width // size[1]))  # its gradient has the same bits on GPUs too
