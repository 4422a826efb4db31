"""Predictions of a distillation's students, alone or beside their teacher, and what they are scored by."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from lit_modules.nets import Outputs, run
from lit_modules.nets.token_head import HIDDEN, TokenHead, run_before_head
from lit_modules.on_policy import OnPolicyLearner
from lit_modules.token_losses import InChunks
from lit_modules.token_scores import HeadInputs, Logits, Predictions, has_chunks


class ScoredBesideTeacher(OnPolicyLearner):
    """A Learner whose students are scored beside their teacher, texts in chunks of tokens: `forward` gives outputs."""

    _chunks: InChunks
    _comparing = False  # whether the teacher is to run, though no loss asks it
    _scoring = False  # whether nets leave their heads out

    def predict(self, inputs: Tensor) -> dict[str, Tensor]:
        return {name: outputs.logits for name, outputs in self._outputs(inputs, False)[1].items()}

    def predict_beside_teacher(self, inputs: Tensor) -> tuple[Tensor | None, dict[str, Tensor]]:
        teacher, students = self._outputs(inputs, self.has_teacher)
        return teacher and teacher.logits, {name: outputs.logits for name, outputs in students.items()}

    def evaluate(self, inputs: Tensor, beside: bool) -> Predictions:
        self.score_chunk = self._chunks.size
        with self._leaving_heads_out():
            teacher, students = self._outputs(inputs, beside and self.has_teacher)
        named = {name: _logits(x, self.students[name].score_head, self.net_of(name)) for name, x in students.items()}
        taught = teacher and _logits(teacher, self._chunks.score_head, self.teacher)
        return Predictions(taught, named, self._averaged(inputs))

    def predict_averaged(self, inputs: Tensor) -> dict[str, Tensor]:
        return {name: run(net, inputs).logits for name, net in self._averages().items()}

    def teacher_head(self) -> TokenHead | None:
        """The teacher's head if scores leave it out now."""
        head = self._chunks.score_head
        return head if self._scoring and has_chunks(self.teacher, head, self._chunks.size) else None

    def _averaged(self, inputs: Tensor) -> dict[str, Logits]:
        logits = dict[str, Logits]()
        for name, net in self._averages().items():
            head = self.students[name].score_head
            left_out = head is not None and has_chunks(net, head, self._chunks.size)
            outputs = run_before_head(net, head, inputs) if head is not None and left_out else run(net, inputs)
            logits[name] = _logits(outputs, head, net)
        return logits

    def _averages(self) -> dict[str, nn.Module]:
        nets = {name: self.average_of(name) for name in self.active_runs}
        return {name: net for name, net in nets.items() if net is not None}

    def _outputs(self, inputs: Tensor, beside: bool) -> tuple[Outputs | None, Mapping[str, Outputs]]:
        """The teacher's outputs, if `beside` it, and those of the active students."""
        self._comparing = beside
        try:
            teacher, students = self(inputs)
        finally:
            self._comparing = False
        return teacher if beside else None, {n: x for n, x in students.items() if n not in self.inactive}

    @contextmanager
    def _leaving_heads_out(self) -> Iterator[None]:
        """Let nets whose heads are whole on this rank give their heads' inputs."""
        self._scoring = True
        for student in self.students.values():
            student.is_scored = True
        try:
            yield
        finally:
            self._scoring = False
            for student in self.students.values():
                student.is_scored = False


def _logits(outputs: Outputs, head: TokenHead | None, net: nn.Module) -> Logits:
    if head is None or HIDDEN not in outputs.features:
        return outputs.logits
    return HeadInputs(outputs.features[HIDDEN], *head.weights(net))
