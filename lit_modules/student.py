"""A student of a distillation: a net and the objective that it learns by."""

from functools import partial

from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput
from lit_modules.nets import Outputs, globalise, layer, run, typed
from lit_modules.objectives import Objective
from lit_modules.objectives.trial import check_rows


class Student(nn.Module):
    """A net and its objective; the objective's parameters train with the net and are not exported."""

    def __init__(self, net: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.net, self.objective = net, objective

    def forward(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features that the objective compares."""
        return self.objective.adapt(self.raw(inputs))

    def raw(self, inputs: Tensor) -> Outputs:
        """Logits (b, classes), and the features of the layers that the objective reads."""
        return run(self.net, inputs, set(self.objective.student_layers.values()))

    def check_layers(self, teacher: nn.Module, flag: str) -> None:
        """Raise BadInput for a layer that the net or the teacher does not have."""
        for option, path in self.objective.student_layers.items():
            layer(self.net, path, f"{flag}.{option}", self.objective.needs)
        for option, path in self.objective.teacher_layers.items():
            layer(teacher, path, f"{flag}.{option}")

    def build(self, example: Tensor, teacher: Outputs | None, seed: int, flag: str) -> None:
        """Let the objective make its parts, from the seed and the shapes alone, and test it on inputs (b, ...)."""
        mode, objective = self.training, self.objective
        outputs = self.eval().raw(typed(self.net, example))
        try:
            keyed.with_seed(seed, partial(objective.build, outputs, teacher))
        except BadInput as fault:
            raise BadInput(f"{flag}.{fault.flag}", fault.value, fault.expected) from None
        globalise(objective.to(outputs.logits.dtype))
        check_rows(objective, outputs, teacher, flag)
        if objective.relates_rows:
            advice = "its numbers move with the device count"
            rank_zero_warn(f"{flag}: {type(objective).__name__} relates rows that a device has; {advice}")
        self.train(mode)
