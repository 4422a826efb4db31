"""Rows that hold several texts each."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from apprentice.errors import BadInput
from lit_modules.objectives.text_objective import of_texts
from lit_modules.training.extras import Extra
from lit_modules.training.student import Student

if TYPE_CHECKING:
    from lit_modules.training.loop import Loop


class PackedTexts(Extra["Loop"]):
    """Refuses students that can't learn from rows of several texts, before they get some.

    Args:
        students: by name.
    """

    def __init__(self, students: Mapping[str, Student]) -> None:
        self.students = dict(students)

    def check_data(self, loop: "Loop", data: Any) -> None:
        if getattr(data, "packs_samples", False):
            for name, student in self.students.items():
                check_packed(name, student)


def check_packed(name: str, student: Student) -> None:
    """Raise BadInput if a student's objective compares rows, which hold several texts each, and not their tokens."""
    texts, method = of_texts(student.objective), type(student.objective).__name__
    if texts.teacher_writes:
        raise BadInput(f"variants.{name}", method, "`data.pack false`: a row has one prompt")
    if share := texts.on_policy:
        raise BadInput(f"variants.{name}.on_policy", share, "0, or `data.pack false`: a row has one prompt")
    if student.per_sequence_terms or student.objective.relates_rows or texts.relates_tokens:
        expected = "an objective that compares tokens one by one, or `data.pack false`: it compares whole texts"
        raise BadInput(f"variants.{name}", method, expected)
