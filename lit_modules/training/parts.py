"""The parts with which a loop trains on one kind of data: the port through which a new kind comes in."""

from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.stored import StoredTeacher, TeacherInFile
from lit_modules.objectives.base import Objective
from lit_modules.tasks.base import Task
from lit_modules.training.extras import Extra
from lit_modules.training.student import Student
from lit_modules.training.teacher import TeacherCache, TeacherOutputs
from lit_modules.training.whole_outputs import WholeOutputs

TEACHER_FILE = "lit_modules.training.teacher_file.TeacherFile"  # imported for a teacher in a file


class Parts:
    """Those for samples with one label each, such as images; options are of other kinds of data.

    Args:
        task: what a label is.
        options: by name; an old checkpoint may have some that say nothing.
    """

    def __init__(self, task: Task, **options: Any) -> None:
        if refused := [(name, value) for name, value in options.items() if value]:
            raise BadInput(*refused[0], f"not allowed with {type(task).__name__}, which has one label a sample")

    def outputs(self) -> WholeOutputs:
        """Return how nets give outputs, and losses and scores are made of them."""
        return WholeOutputs()

    def extras(self) -> list[Extra[Any]]:
        """Return what any loop does beside training on the data's batches."""
        return []

    def batches(
        self, students: Mapping[str, Student], teacher: nn.Module, example: Tensor, folder: str | Path | None,
        seed: int, tell: Callable[[str], object],
    ) -> list[Extra[Any]]:  # fmt: skip
        """Return what gives a distillation other batches than the data's.

        `example` are inputs (b, ...); `folder` keeps what the teacher gives for other runs; `tell` prints a line.
        """
        return []

    def teacher_outputs(
        self, teacher: nn.Module, objectives: Mapping[str, Objective], classes: int, max_mb: int,
        folder: str | Path | None, tell: Callable[[str], object],
    ) -> TeacherOutputs:  # fmt: skip
        """Return what stores a teacher's outputs of so many classes; BadInput for a teacher that can't be stored."""
        if isinstance(teacher, TeacherInFile):
            of_file: TeacherOutputs = resolve_name(TEACHER_FILE)(teacher)
            return of_file
        if isinstance(teacher, StoredTeacher):
            raise BadInput("teacher", type(teacher).__name__, "what was stored of it beside it")
        return TeacherCache(teacher, max_mb, folder, tell)


def parts_of(task: Task, options: Mapping[str, Any]) -> Parts:
    """Return those that a task names."""
    parts: Parts = resolve_name(task.parts)(task, **options)
    return parts
