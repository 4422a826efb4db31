"""Sequence-level distillation of language models (Kim and Rush 2016)."""

from torch import Tensor

from lit_modules.objectives.base import Outputs, Term, ce_term
from lit_modules.objectives.text_objective import TextObjective


class SequenceLevel(TextObjective):
    """CE of the responses that the teacher writes to the prompts of the data, in place of the data's own.

    They are written once, before the first step, for all students of the same options, and kept in
    `teacher_cache_dir`, if that is given, for other runs with the same teacher, texts and options.

    Source: Kim and Rush 2016, "Sequence-Level Knowledge Distillation" (arXiv:1606.07947), section 3.2; there the texts
    are those of a beam search, here the likeliest token, or one that is drawn, follows the other.

    Args:
        max_new_tokens: of a response at most.
        sampling_temperature: divides the logits from which tokens are drawn; 0 takes the likeliest.
    """

    uses_teacher = False
    by_token = True
    teacher_writes = True
    on_policy = 1.0

    def __init__(self, max_new_tokens: int = 128, sampling_temperature: float = 0.0) -> None:
        super().__init__()
        self.set_sampling(max_new_tokens, sampling_temperature)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        return {"ce": ce_term(student, labels, 1.0)}
