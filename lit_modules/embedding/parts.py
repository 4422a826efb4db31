"""The parts with which a loop trains nets that embed."""

from torch import Tensor

from lit_modules.nets.outputs import Outputs
from lit_modules.tasks.scores import Embeddings, Scored
from lit_modules.training.parts import Parts
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
