"""Several nets cut into the pieces of one pipeline, which they go down side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lit_modules.nets import Outputs, any_kernel, pipeline_stages, stage_of, typed

Cast = Callable[[], tuple[bool, Sequence[str]]]


class Track(NamedTuple):
    """How a net goes down the pipeline.

    Attributes:
        pieces: its modules in each stage, none in some.
        features: stages after which the outputs of layers are known, with the modules that give them, by path.
        widths: how many tensors the net has between its modules behind each stage.
    """

    pieces: list[list[nn.Module]]
    features: dict[str, tuple[int, nn.Module]]
    widths: list[int]

    def known(self, stage: int) -> list[str]:
        """The features that are known before a stage."""
        return [path for path, (where, _) in self.features.items() if where < stage]


def side_by_side(teacher: nn.Module, students: Mapping[str, Any], active: Cast, example: Tensor) -> list[nn.Module]:
    """The stages of a distillation: their composition gives the teacher's outputs, or None, and those of students.

    Args:
        teacher: its net.
        students: by name; each has a net and an objective.
        active: says who takes part: whether the teacher, and which students.
        example: (1, ...) of the inputs.

    Raises:
        BadInput: a net can't be cut.
    """
    asked: dict[str, str] = {}  # of the teacher, by path the flag that names it
    nets = [(teacher, asked)]
    for name, student in students.items():
        objective = student.objective
        asked |= {path: f"variants.{name}.{flag}" for flag, path in objective.teacher_layers.items()}
        nets.append((student.net, {p: f"variants.{name}.{flag}" for flag, p in objective.student_layers.items()}))
    modules = [pipeline_stages(net) for net, _ in nets]
    count = max(map(len, modules))
    tracks = [_track(net, layers, own, count, example) for (net, layers), own in zip(nets, modules, strict=True)]
    named = dict(zip(students, tracks[1:], strict=True))
    return [Stage(number, count, tracks[0], named, students, active) for number in range(count)]


def _track(net: nn.Module, layers: Mapping[str, str], modules: list[nn.Module], count: int, example: Tensor) -> Track:
    slots = [number * count // len(modules) for number in range(len(modules))]
    pieces = [[m for m, slot in zip(modules, slots, strict=True) if slot == stage] for stage in range(count)]
    found = {path: stage_of(net, modules, path, layers[path]) for path in sorted(layers)}
    features = {path: (slots[number], module) for path, (number, module) in found.items()}
    return Track(pieces, features, list(_widths(net, pieces, example)))


def _widths(net: nn.Module, pieces: list[list[nn.Module]], x: Any) -> Iterator[int]:
    modes = {m: m.training for m in net.modules()}
    x = typed(net, x)
    with torch.no_grad(), any_kernel(net):
        net.eval()
        for piece in pieces:
            for module in piece:
                x = module(*x) if isinstance(x, tuple) else module(x)
            yield len(x) if isinstance(x, tuple) else 1
    for module, mode in modes.items():
        module.training = mode


class Stage(nn.Module):
    """One stage of all nets; it takes and gives what each has computed so far, and the features that are known."""

    def __init__(
        self, number: int, count: int, teacher: Track, tracks: Mapping[str, Track], students: Mapping[str, Any],
        active: Cast,
    ) -> None:  # fmt: skip
        super().__init__()
        self.number, self.is_last, self.active = number, number == count - 1, active
        self.tracks = {"": teacher, **tracks}  # "" is no student's name
        self.layers = nn.ModuleList(m for track in self.tracks.values() for m in track.pieces[number])
        objectives = {name: student.objective for name, student in students.items()}
        self.objectives = nn.ModuleDict(objectives if self.is_last else {})

    def forward(self, *tensors: Tensor) -> Any:
        """From inputs (b, ...), or what the stage before gave, to what the next one takes; the last gives outputs."""
        teacher, names = self.active()
        rest = iter(tensors)
        found = {name: self._net(name, tensors if self.number == 0 else rest) for name in [""] * teacher + [*names]}
        if not self.is_last:
            return tuple(x for state, features in found.values() for x in (*state, *features.values()))
        outputs = {name: Outputs(state[0], features) for name, (state, features) in found.items()}
        taught = outputs.pop("", None)
        return taught, {name: self.objectives[name].adapt(out) for name, out in outputs.items()}  # type: ignore[operator]

    def _net(self, name: str, given: Any) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        track = self.tracks[name]
        rest = iter(given)
        x = tuple(next(rest) for _ in range(track.widths[self.number - 1] if self.number else 1))
        features = {path: next(rest) for path in track.known(self.number)}
        here = {path: module for path, (stage, module) in track.features.items() if stage == self.number}
        with ExitStack() as stack:
            if not name:
                stack.enter_context(torch.no_grad())
            for path, module in here.items():
                handle = module.register_forward_hook(lambda _m, _i, out, path=path: features.__setitem__(path, out))
                stack.callback(handle.remove)
            for module in track.pieces[self.number]:
                given = module(*x)
                x = given if isinstance(given, tuple) else (given,)
        ordered = {path: features[path] for path in track.features if path in features}
        return x, ordered
