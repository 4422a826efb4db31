"""Nets of texts leave their heads out, and losses and scores are computed in chunks of tokens: the port for texts."""

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

from apprentice.batch import Batch
from apprentice.errors import BadInput
from lit_modules.nets.ensemble import Ensemble
from lit_modules.nets.layers import run
from lit_modules.nets.other_tokens import OtherTokens, text_lengths
from lit_modules.nets.outputs import Outputs
from lit_modules.nets.stored import StoredTeacher, TeacherWithoutWeights
from lit_modules.nets.token_head import TokenHead, find_token_head, has_local_weight, run_to_head
from lit_modules.objectives.base import Objective, condense_teacher
from lit_modules.objectives.context import StepContext
from lit_modules.objectives.text_objective import of_texts
from lit_modules.tasks.scores import Scored
from lit_modules.text.packed_texts import check_packed
from lit_modules.text.token_losses import chunk_losses
from lit_modules.text.token_scores import measure_tokens
from lit_modules.training.student import Losses, Student
from lit_modules.training.whole_outputs import Predictions, Purpose, WholeOutputs

CHUNK = 128  # tokens whose logits are held at once
LARGE = 4096  # tokens of a vocabulary from which on losses are computed in chunks


class ChunkedOutputs(WholeOutputs):
    """Nets whose logits no one needs at once give the inputs of their heads.

    Attributes:
        size: tokens whose logits are held at once; 0 for all of a batch. Known when nets are chosen.

    Args:
        size: the same; None for CHUNK if the vocabulary is LARGE, and else 0.
        has_chunks: whether values of single tokens do for scores.
        is_stored: whether the teacher's outputs are stored, and so always asked as a whole.

    Raises:
        BadInput: the size is negative.
    """

    def __init__(self, size: int | None, has_chunks: bool, is_stored: bool) -> None:
        if size is not None and size < 0:
            raise BadInput("loss_chunk", size, "a number of tokens, or 0 for all of a batch at once")
        self.wanted, self.has_chunks, self.is_stored, self.size = size, has_chunks, is_stored, 0
        self._heads: dict[str, TokenHead] = {}  # of students whose losses are computed in chunks
        self._score_heads: dict[str, TokenHead] = {}  # that scores leave out, also of other students
        self._teacher_head: TokenHead | None = None  # that losses leave out
        self._teacher_score_head: TokenHead | None = None
        self._needs_lengths = False  # whether the teacher has other tokens, and has to know where texts end
        self._reads_logits = False  # whether a student reads the teacher's logits of all tokens
        self._alone: tuple[TokenHead | None] | None = None  # of a net that is scored alone, once it is searched

    def choose(self, teacher: nn.Module, students: Mapping[str, Student], example: Tensor, classes: int) -> None:
        """Choose the students, by their objectives and nets alone, given inputs (b, T); scores need no more."""
        self._needs_lengths = isinstance(teacher, OtherTokens)
        usual = CHUNK if classes >= LARGE else 0
        self.size = (usual if self.wanted is None else self.wanted) if self.has_chunks else 0
        if not self.size:
            return
        has_weights = not isinstance(teacher, Ensemble | TeacherWithoutWeights)
        self._teacher_score_head = find_token_head(teacher, example) if has_weights else None
        for name, student in students.items():
            if (head := find_token_head(student.net, example)) is not None:
                self._score_heads[name] = head
        if isinstance(teacher, Ensemble):  # whose members' logits are compared
            return
        peers = {peer for student in students.values() for peer in student.objective.peers}
        by_token = {n for n, student in students.items() if _goes_by_token(student.objective) and n not in peers}
        self._heads = {name: head for name, head in self._score_heads.items() if name in by_token}
        whole = [student for name, student in students.items() if name not in self._heads]
        self._reads_logits = any(s.objective.uses_teacher for s in whole)
        if self._heads and any(s.objective.uses_teacher for s in students.values()):
            self._teacher_head = self._teacher_score_head

    def beside(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return where the texts of a row begin, or for a teacher of other tokens where they end."""
        if batch.starts is not None:
            return (batch.starts,)
        knows_ends = self._needs_lengths and batch.labels.dim() == 2 and batch.inputs.shape == batch.labels.shape
        return (text_lengths(batch.inputs, batch.labels),) if knows_ends else ()

    def run_alone(self, net: nn.Module, inputs: Tensor, forward: Callable[[Tensor], Tensor]) -> Outputs:
        head = self._find_alone(net, inputs)
        if head is None or not has_local_weight(net, head):
            return super().run_alone(net, inputs, forward)
        return run_to_head(net, head, inputs)

    def _find_alone(self, net: nn.Module, inputs: Tensor) -> TokenHead | None:
        """Return the head of a language model with a large vocabulary that is all on this rank."""
        is_here = all(type(p) is nn.Parameter and not p.is_meta for p in net.parameters())
        if self._alone is None and is_here and self.has_chunks and not inputs.is_floating_point():
            head = find_token_head(net, inputs.new_zeros(1, 2))
            self._alone = (head if head is not None and head.size >= LARGE else None,)
        return self._alone[0] if self._alone is not None else None

    def run_average(self, name: str, net: nn.Module, inputs: Tensor) -> Outputs:
        head = self._score_heads.get(name)
        return run_to_head(net, head, inputs) if head and has_local_weight(net, head) else run(net, inputs)

    def run_teacher(
        self, net: nn.Module, inputs: Tensor, beside: Sequence[Tensor], names: Collection[str],
        objectives: Mapping[str, Objective], purpose: Purpose,
    ) -> Outputs:  # fmt: skip
        head = self._teacher_score_head
        if purpose == "scores" and head is not None and has_local_weight(net, head):
            return run_to_head(net, head, inputs, (), beside)
        head = None if self.is_stored or purpose != "losses" else self._teacher_head
        if head is None or not has_local_weight(net, head):
            return super().run_teacher(net, inputs, beside, names, objectives, purpose)
        if not self._reads_logits:
            return run_to_head(net, head, inputs, (), beside)
        return condense_teacher(run_to_head(net, head, inputs, names, beside, with_logits=True), objectives)

    def ask(self, net: nn.Module, inputs: Tensor, names: Collection[str], beside: Sequence[Tensor] = ()) -> Outputs:
        if isinstance(net, StoredTeacher):  # for checks and costs of shapes alone: training reads the files
            return Outputs(net.zeros(inputs), {})
        return super().ask(net, inputs, names, beside)

    def run_student(
        self, name: str, student: Student, inputs: Tensor, beside: Sequence[Tensor], purpose: Purpose
    ) -> Outputs:
        beside = () if self._needs_lengths else beside
        heads = {"scores": self._score_heads, "losses": self._heads}.get(purpose, {})
        head = heads.get(name)
        if head is not None and has_local_weight(student.net, head):
            return run_to_head(student.net, head, inputs, (), beside)
        return super().run_student(name, student, inputs, beside, purpose)

    def losses(
        self, students: Mapping[str, Student], outputs: Mapping[str, Outputs], teacher: Outputs | None, batch: Batch,
        context: StepContext,
    ) -> dict[str, Losses]:  # fmt: skip
        """Return the losses of students, in chunks of those whose heads were left out."""
        if batch.starts is not None:
            for name, student in students.items():
                check_packed(name, student)
        in_chunks = {name: student for name, student in students.items() if outputs[name].hidden}
        chunked = chunk_losses(in_chunks, outputs, teacher, batch, context, self.size) if in_chunks else {}
        whole = {name: student for name, student in students.items() if name not in chunked}
        rest = super().losses(whole, outputs, teacher and teacher._replace(hidden=()), batch, context)
        return {name: chunked[name] if name in chunked else rest[name] for name in students}

    def measure(self, predictions: Predictions[Outputs], labels: Tensor) -> Predictions[Scored]:
        """Return values of tokens, of `size` at a time, if some logits are not there."""
        outputs = predictions.teacher, *predictions.students.values(), *predictions.averaged.values()
        if not any(x is not None and x.hidden for x in outputs):
            return super().measure(predictions, labels)
        size = self.size or CHUNK
        students = measure_tokens(predictions.students, predictions.teacher, labels, size)
        return Predictions(None, students, measure_tokens(predictions.averaged, None, labels, size))


def _goes_by_token(objective: Objective) -> bool:
    reads = objective.relates_rows or objective.peers or {**objective.student_layers, **objective.teacher_layers}
    has_state = any(True for _ in (*objective.parameters(), *objective.buffers()))
    return of_texts(objective).by_token and not reads and not has_state
