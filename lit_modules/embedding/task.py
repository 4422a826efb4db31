"""No labels: nets give embeddings, and are judged by the neighbours that they share with a teacher."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from apprentice.batch import Batch
from apprentice.errors import BadInput
from lit_modules.embedding.neighbours import NEIGHBOURS, difference_of_cosines, shared_neighbours
from lit_modules.nets.outputs import EMBEDDINGS
from lit_modules.tasks.base import Metric, Range, Task
from lit_modules.tasks.scores import Embeddings, Gathered, Scored, Scores

SHARED = Metric(
    name="test_neighbours", tested=("test_neighbours",), columns={"test_neighbours": "shared neighbours, %"},
    word="shared neighbours", title=f"of {NEIGHBOURS} nearest neighbours those of the teacher, %",
    chart="neighbours shared with the teacher", unit="points", higher_is_better=True, scale=100.0, digits=2,
    counted="samples", limits=(0.0, 100.0), of_samples="test_shared",
    beside=("test_knn", "test_probe"), baseline="untrained",
)  # fmt: skip


class Embedding(Task):
    """Samples whose labels nobody sees; nets give embeddings (b, D), and students have a teacher's to learn from.

    What is judged needs no label: of each sample of the set, its nearest neighbours in the same set by a teacher's
    embeddings and by a student's; the score is the share that both have.
    """

    metrics: ClassVar[Mapping[str, Metric]] = MappingProxyType({"neighbours": SHARED})
    metric = SHARED
    parts = "lit_modules.embedding.parts.EmbeddingParts"
    outputs = EMBEDDINGS
    net = "lit_modules.nets.embedder.Embedder"
    fidelity = ()
    beside_teacher = True

    @classmethod
    def of_data(cls, data: Any, metric: Any = None) -> "Embedding":  # noqa: ARG003
        if metric not in {None, "neighbours"}:
            raise BadInput("metric", metric, "not allowed with `data.task embedding`, judged by shared neighbours")
        return cls()

    def scores(self) -> Scores:
        return NeighbourScores()

    def check_labels(self, labels: Range, classes: int, weighted: bool, training: bool) -> None:
        """Nothing: no label is read."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        raise BadInput("data.task", "embedding", "a teacher that is loaded: nets learn nothing from labels here")

    def counts(self, batch: Batch) -> dict[str, Tensor]:
        return {}

    def keep_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"shared": values["shared"]}


class NeighbourScores(Scores):
    """Shared neighbours, and as `loss` the mean squared difference of the cosines of all pairs of samples."""

    names = ("neighbours",)
    trained = ()
    sampled = ()

    def __init__(self) -> None:
        super().__init__()
        self.gathered = Gathered("student", "teacher")

    def update(self, logits: Scored, labels: Tensor) -> None:
        assert isinstance(logits, Embeddings)
        self.gathered.update(self.index, student=logits.student, teacher=logits.teacher)

    def compute(self) -> dict[str, Tensor]:
        gathered = self.gathered.compute()
        pair = gathered["student"], gathered["teacher"]
        return {"loss": difference_of_cosines(*pair), "neighbours": shared_neighbours(*pair).mean()}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {}

    def of_all_samples(self) -> dict[str, Tensor]:
        gathered = self.gathered.compute()
        return {"place": gathered["place"], "shared": shared_neighbours(gathered["student"], gathered["teacher"])}
