"""The parts with which a loop trains nets that embed."""

from collections.abc import Mapping

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.outputs import EMBEDDINGS, Outputs
from lit_modules.tasks.scores import Embeddings, Scored
from lit_modules.training.parts import Parts
from lit_modules.training.student import Student
from lit_modules.training.whole_outputs import Predictions, WholeOutputs


class EmbeddingParts(Parts):
    """Those for samples without labels."""

    def outputs(self) -> "EmbeddingOutputs":
        return EmbeddingOutputs()


class EmbeddingOutputs(WholeOutputs):
    """Outputs that are scored beside a teacher's; a net that is its own teacher shares all."""

    def measure(self, predictions: Predictions[Outputs], labels: Tensor) -> Predictions[Scored]:
        teacher = predictions.teacher

        def pair(outputs: Outputs) -> Embeddings:
            return Embeddings(outputs.logits, (teacher or outputs).logits)

        students, averaged = (
            {name: pair(outputs) for name, outputs in nets.items()}
            for nets in (predictions.students, predictions.averaged)
        )
        return Predictions(None, students, averaged)


class RetrievalParts(EmbeddingParts):
    """Those for rows of texts."""

    def outputs(self) -> "RetrievalOutputs":
        return RetrievalOutputs()


class RetrievalOutputs(EmbeddingOutputs):
    """Outputs of nets that embed texts, or score pairs of them."""

    def choose(self, teacher: nn.Module, students: Mapping[str, Student], example: Tensor, classes: int) -> None:
        """Raise BadInput for students of both kinds, or scores from which a student can't learn or be judged."""
        rankers = [name for name, student in students.items() if ranks_pairs(student.net)]
        if 0 < len(rankers) < len(students):
            what = "students that all embed, or all score pairs: one looks among all texts, the other in a row"
            raise BadInput(f"variants.{rankers[0]}", type(students[rankers[0]].net).__name__, what)
        for name in rankers:
            objective = students[name].objective
            if objective.learns and EMBEDDINGS in objective.compares:
                expected = "a method of scores, such as ScoreKL: a net that scores pairs gives no embeddings"
                raise BadInput(f"variants.{name}", type(objective).__name__, expected)


def ranks_pairs(net: nn.Module) -> bool:
    """Return whether a net gives scores (b, k - 1) of a row's other texts, no embeddings."""
    return bool(getattr(net, "ranks", False))
