"""Pipeline stages of a distillation: teacher and students side by side."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.attention.form import any_kernel
from lit_modules.nets.base import cast_inputs, evaluating, pipeline_stages
from lit_modules.nets.layers import find_stage, input_names, observe
from lit_modules.nets.outputs import Outputs
from lit_modules.objectives.base import Objective, condense_teacher
from lit_modules.training.student import TEACHER, Student
from lit_modules.training.whole_outputs import ForwardRequest


class Track(NamedTuple):
    """A net's way through the pipeline."""

    pieces: list[list[nn.Module]]  # its modules in each stage; some stages may have none
    features: dict[str, tuple[int, nn.Module]]  # layers that are read: the stage that computes it, and its module
    inputs: set[str]  # those of the layers whose module's input is meant
    widths: list[int]  # number of tensors that the net passes on after each stage


def side_by_side(
    teacher: nn.Module, students: Mapping[str, Student], step_request: Callable[[], ForwardRequest], example: Tensor
) -> list[nn.Module]:
    """The stages of a distillation, whose composition gives the teacher's outputs, or None, and the students' outputs.

    `step_request` is what a forward without a request computes. BadInput if a net can't be cut.
    """
    teacher_layers: dict[str, str] = {}  # their paths, and the flag that names each
    nets = [(teacher, teacher_layers)]
    for name, student in students.items():
        objective = student.objective
        if objective.teacher_parts():
            expected = "an objective without trained parts for the teacher's outputs, which a pipeline does not train"
            raise BadInput(f"variants.{name}", type(objective).__name__, expected)
        teacher_layers |= {path: f"variants.{name}.{flag}" for flag, path in objective.teacher_layers.items()}
        nets.append((student.net, {p: f"variants.{name}.{flag}" for flag, p in objective.student_layers.items()}))
    modules = [pipeline_stages(net) for net, _ in nets]
    count = max(map(len, modules))
    tracks = [_track(net, layers, cut, count, example) for (net, layers), cut in zip(nets, modules, strict=True)]
    named = dict(zip([TEACHER, *students], tracks, strict=True))
    return [Stage(number, count, named, students, step_request) for number in range(count)]


def _track(net: nn.Module, layers: Mapping[str, str], modules: list[nn.Module], count: int, example: Tensor) -> Track:
    slots = [number * count // len(modules) for number in range(len(modules))]
    pieces = [[m for m, slot in zip(modules, slots, strict=True) if slot == stage] for stage in range(count)]
    stages = {path: find_stage(net, modules, path, layers[path]) for path in sorted(layers)}
    features = {path: (slots[number], module) for path, (number, module) in stages.items()}
    widths: list[int] = []
    x: tuple[Tensor, ...] = (cast_inputs(net, example),)
    with evaluating(net), any_kernel(net):
        for piece in pieces:
            for module in piece:
                x = _tuple(module(*x))
            widths.append(len(x))
    return Track(pieces, features, input_names(net, layers), widths)


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


class Stage(nn.Module):
    """One stage of all nets. Its inputs and outputs are each net's tensors, followed by its features so far."""

    def __init__(
        self, number: int, count: int, tracks: Mapping[str, Track], students: Mapping[str, Student],
        step_request: Callable[[], ForwardRequest],
    ) -> None:  # fmt: skip
        super().__init__()
        self.number, self.is_last, self.tracks, self.step_request = number, number == count - 1, tracks, step_request
        self.layers = nn.ModuleList(m for track in self.tracks.values() for m in track.pieces[number])
        objectives = {name: student.objective for name, student in students.items()}
        self.objectives = nn.ModuleDict(objectives if self.is_last else {})

    def forward(self, *tensors: Tensor, request: ForwardRequest | None = None) -> Any:
        """Takes inputs (b, ...) or the previous stage's tensors; gives those for the next, or at the end outputs."""
        request, rest = request or self.step_request(), iter(tensors)
        running = [TEACHER, *request.students] if request.teacher else request.students
        states = {name: self._net(name, iter(tensors) if self.number == 0 else rest) for name in running}
        if not self.is_last:
            return tuple(x for state, features in states.values() for x in (*state, *features.values()))
        outputs = {name: Outputs(state[0], features) for name, (state, features) in states.items()}
        teacher_outputs = outputs.pop(TEACHER, None)
        objectives = cast("Mapping[str, Objective]", self.objectives)  # it has a mapping's methods
        if teacher_outputs is not None:
            teacher_outputs = condense_teacher(teacher_outputs, objectives)
        return teacher_outputs, {name: objectives[name].adapt(out) for name, out in outputs.items()}

    def _net(self, name: str, tensors: Iterator[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        track = self.tracks[name]
        x = tuple(next(tensors) for _ in range(track.widths[self.number - 1] if self.number else 1))
        first = next((p for m in track.pieces[0] for p in m.parameters()), None)
        if self.number == 0 and first is not None and x[0].is_floating_point():
            x = (x[0].to(first.dtype),)
        features = {path: next(tensors) for path, (stage, _) in track.features.items() if stage < self.number}
        read = {path: module for path, (stage, module) in track.features.items() if stage == self.number}
        trains = torch.is_grad_enabled() and name != TEACHER
        with torch.set_grad_enabled(trains), observe(read, track.inputs) as outputs:
            for module in track.pieces[self.number]:
                x = _tuple(module(*x))
        features |= outputs
        return x, {path: features[path] for path in track.features if path in features}
