"""How nets give outputs, and losses and scores are made of these: the port, of whole outputs."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

from torch import Tensor, nn

from apprentice.batch import Batch
from lit_modules.nets.layers import run
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.stored import TeacherInFile
from lit_modules.objectives.base import Objective, condense_teacher
from lit_modules.objectives.context import StepContext
from lit_modules.tasks.scores import Scored
from lit_modules.training.student import Losses, Student

T = TypeVar("T")

# What outputs are for: losses, scores, or whoever reads all of them, such as a store of the teacher's.
Purpose = Literal["losses", "scores", "all"]


@dataclass(frozen=True)
class ForwardRequest:
    """What a forward computes: whether the teacher's outputs, those of which students, and for what."""

    teacher: bool
    students: Sequence[str]
    purpose: Purpose = "all"


class Predictions(NamedTuple, Generic[T]):
    """What evaluation scores of a batch: outputs of nets, or what scores are made of."""

    teacher: T | None  # if the test has one to compare with
    students: Mapping[str, T]  # by run
    averaged: Mapping[str, T]  # by run, of the moving averages of weights


class WholeOutputs:
    """Nets give all of their logits, for whatever purpose."""

    def choose(self, teacher: nn.Module, students: Mapping[str, Student], example: Tensor, classes: int) -> None:
        """Choose how each net gives outputs, given example inputs (b, ...) and the number of logits."""

    def beside(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return what `forward` gets of a batch beside its inputs, (b, ...) each."""
        return ()

    def run_alone(self, net: nn.Module, inputs: Tensor, forward: Callable[[Tensor], Tensor]) -> Outputs:
        """Run a loop's only net, which `forward` runs as a whole, to score it."""
        return Outputs(forward(inputs), {})

    def run_average(self, name: str, net: nn.Module, inputs: Tensor) -> Outputs:
        """Run the average of a student, of this name, to score it."""
        return run(net, inputs)

    def ask(self, net: nn.Module, inputs: Tensor, names: Collection[str], beside: Sequence[Tensor] = ()) -> Outputs:
        """Run a teacher; return its outputs with the features of these layers, zeros of one that is in a file."""
        return net.zeros(inputs, names) if isinstance(net, TeacherInFile) else run(net, inputs, names, beside)

    def run_teacher(
        self, net: nn.Module, inputs: Tensor, beside: Sequence[Tensor], names: Collection[str],
        objectives: Mapping[str, Objective], purpose: Purpose,
    ) -> Outputs:  # fmt: skip
        """Run a teacher for students."""
        return condense_teacher(self.ask(net, inputs, names, beside), objectives)

    def run_student(
        self, name: str, student: Student, inputs: Tensor, beside: Sequence[Tensor], purpose: Purpose
    ) -> Outputs:
        """Run a student, of this name."""
        outputs: Outputs = student(inputs, *beside)
        return outputs

    def losses(
        self, students: Mapping[str, Student], outputs: Mapping[str, Outputs], teacher: Outputs | None, batch: Batch,
        context: StepContext,
    ) -> dict[str, Losses]:  # fmt: skip
        """Return the losses of students, given the outputs of students and peers, and the teacher's, if any."""
        return {name: student.step_losses(name, teacher, outputs, batch, context) for name, student in students.items()}

    def measure(self, predictions: Predictions[Outputs], labels: Tensor) -> Predictions[Scored]:
        """Return what scores are made of, given the labels."""
        students, averaged = (
            {name: x.logits for name, x in nets.items()} for nets in (predictions.students, predictions.averaged)
        )
        return Predictions(predictions.teacher and predictions.teacher.logits, students, averaged)
