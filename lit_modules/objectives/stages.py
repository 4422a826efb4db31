"""The base of objectives that compare several layers."""

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
        given = {"student_stages": student_stages, "teacher_stages": teacher_stages}
        counts = {option: len(paths) for option, paths in given.items() if paths is not None}
        for option, count in counts.items():
            if not count or {*counts.values()} != {count}:
                raise BadInput(option, given[option], "names of layers, as many of the student as of the teacher")
        self.given = given

    def choose(self, student: nn.Module, teacher: nn.Module) -> None:
        """All stages that both nets have, unless they were given."""
        nets = {"student_stages": student, "teacher_stages": teacher}
        named = {option: self.given[option] or getattr(net, "stages", ()) for option, net in nets.items()}
        for option, net in nets.items():
            if not named[option]:
                raise BadInput(option, None, f"names of layers, as {type(net).__name__} names no stages")
        last = [f"stage{number}" for number in range(-min(map(len, named.values())), 0)]
        chosen = {option: self.given[option] or last for option in nets}
        for option, paths in chosen.items():
            if len(paths) != len(last):
                expected = f"{len(last)} layers, as the other net has so many stages, or that net's layers by name too"
                raise BadInput(option, paths, expected)
        self.student_layers, self.teacher_layers = (_numbered(option, paths) for option, paths in chosen.items())

    def pairs(self, student: Outputs, teacher: Outputs | None) -> list[tuple[Tensor, Tensor]]:
        """The outputs of each pair of layers, the student's first."""
        assert teacher is not None
        paths = zip(self.student_layers.values(), self.teacher_layers.values(), strict=True)
        return [(student.features[own], teacher.features[other]) for own, other in paths]


def _numbered(option: str, paths: Sequence[str]) -> dict[str, str]:
    return {f"{option}.{number}": path for number, path in enumerate(paths)}
