"""The parts with which a loop trains on texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput, naming
from lit_modules.nets.batch_norm import has_no_running_statistics
from lit_modules.nets.ensemble import Ensemble
from lit_modules.nets.served import Served
from lit_modules.objectives.base import Objective
from lit_modules.objectives.text_objective import TextObjective, of_texts
from lit_modules.tasks.tokens import Tokens
from lit_modules.text.accumulation import TokenAccumulation
from lit_modules.text.chunked_outputs import ChunkedOutputs
from lit_modules.text.on_policy import OnPolicyTexts
from lit_modules.text.packed_texts import PackedTexts
from lit_modules.text.stored_teacher import Stored, TextStore, form_of
from lit_modules.training.extras import Extra
from lit_modules.training.parts import Parts
from lit_modules.training.student import Student
from lit_modules.training.teacher import TeacherOutputs


class TextParts(Parts):
    """Those for texts, with a label for each token.

    Args:
        task: what a label is.
        loss_chunk: for how many tokens logits are held at once; 0: for all of a batch; default: 128 if there are 4,096
            tokens or more in the vocabulary.
        end_tokens: tokens that end a response which a student writes.
        stored: what is kept in `teacher_cache_dir` of the teacher's distribution for each token that counts; then later
            runs read it, and the teacher may be a `StoredTeacher`.
    """

    def __init__(
        self, task: Tokens, loss_chunk: int | None = None, end_tokens: Sequence[int] = (), stored: Stored | None = None
    ) -> None:
        self.task, self.loss_chunk, self.end_tokens, self.stored = task, loss_chunk, tuple(end_tokens), stored

    def outputs(self) -> ChunkedOutputs:
        return ChunkedOutputs(self.loss_chunk, self.task.has_chunks, self.stored is not None)

    def extras(self) -> list[Extra[Any]]:
        return [TokenAccumulation()]

    def batches(
        self, students: Mapping[str, Student], teacher: nn.Module, example: Tensor, folder: str | Path | None,
        seed: int, tell: Callable[[str], object],
    ) -> list[Extra[Any]]:  # fmt: skip
        writes = False
        for name, student in students.items():
            with naming(f"variants.{name}"):
                objective = of_texts(student.objective)
                if isinstance(objective, TextObjective) and example.is_floating_point():
                    objective.refuse_writing()
            writes = writes or objective.on_policy > 0
        packed = PackedTexts(students)
        return [OnPolicyTexts(students, teacher, folder, self.end_tokens, seed, tell), packed] if writes else [packed]

    def teacher_outputs(
        self, teacher: nn.Module, objectives: Mapping[str, Objective], classes: int, max_mb: int,
        folder: str | Path | None, tell: Callable[[str], object],
    ) -> TeacherOutputs:  # fmt: skip
        stored = self.stored
        if stored is None:
            return super().teacher_outputs(teacher, objectives, classes, max_mb, folder, tell)
        if folder is None:
            raise BadInput("teacher_top_k", stored.top_k, "`teacher_cache_dir DIR` beside it, where outputs are kept")
        depends = any(map(has_no_running_statistics, teacher.modules()))
        if isinstance(teacher, Ensemble) or depends:
            why = (
                "depend on the batch, by its statistics" if depends else "are the mean of several, which is not stored"
            )
            raise BadInput("teacher_top_k", stored.top_k, f"a teacher whose outputs can be stored; this one's {why}")
        stored = replace(stored, is_served=stored.is_served or isinstance(teacher, Served))
        return TextStore(teacher, folder, form_of(stored, objectives, classes), classes, stored.source, tell)
