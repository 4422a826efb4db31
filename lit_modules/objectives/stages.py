"""The base class of objectives that compare several layers."""

from collections.abc import Sequence

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Outputs
from lit_modules.objectives.base import Objective


class StagesObjective(Objective):
    """An objective that compares several layers of the student with as many of the teacher.

    Args:
        student_stages: the student's layers; default: all stages that both nets have, counted from the last.
        teacher_stages: the teacher's layers.
    """

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
        return [(student.features[path_s], teacher.features[path_t]) for path_s, path_t in paths]


def number_layers(option: str, paths: Sequence[str]) -> dict[str, str]:
    """Return paths by `<option>.<number>`."""
    return {f"{option}.{number}": path for number, path in enumerate(paths)}
