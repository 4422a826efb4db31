"""No labels: nets give embeddings, and are judged by the neighbours that they share with a teacher."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.utilities.data import dim_zero_cat

from apprentice.batch import Batch
from apprentice.errors import BadInput
from lit_modules.embedding.neighbours import NEIGHBOURS, difference_of_cosines, shared_neighbours
from lit_modules.tasks.base import EMBEDDINGS, Metric, Range, Task
from lit_modules.tasks.scores import Embeddings, Scored, Scores

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

    def scores(self) -> "NeighbourScores":
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
        self.gathered = Gathered()

    def update(self, logits: Scored, labels: Tensor) -> None:
        assert isinstance(logits, Embeddings)
        index = torch.arange(len(labels), device=labels.device) if self.index is None else self.index
        self.gathered.update(index, *logits)

    def compute(self) -> dict[str, Tensor]:
        _, student, teacher = self.gathered.compute()
        shared = shared_neighbours(student, teacher).mean()
        return {"loss": difference_of_cosines(student, teacher), "neighbours": shared}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {}

    def of_all_samples(self) -> dict[str, Tensor]:
        places, student, teacher = self.gathered.compute()
        return {"place": places, "shared": shared_neighbours(student, teacher)}


class Gathered(torchmetrics.Metric):
    """Embeddings of a student and of its teacher on all ranks, in the order of their places."""

    index: list[Tensor]
    student: list[Tensor]  # flat, as a rank without a sample does not know the width
    teacher: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        for name in ("index", "student", "teacher"):
            self.add_state(name, [], dist_reduce_fx="cat")
        self.reset()

    def reset(self) -> None:
        """Start with none; a rank may get no sample, and others wait for what it has."""
        super().reset()
        self.index = [torch.zeros(0, dtype=torch.int64, device=self.device)]
        self.student, self.teacher = ([torch.zeros(0, dtype=torch.float64, device=self.device)] for _ in range(2))

    def update(self, index: Tensor, student: Tensor, teacher: Tensor) -> None:
        """Add b samples: their places (b,) and embeddings (b, D_s) and (b, D_t)."""
        self.index.append(index)
        self.student.append(student.detach().double().flatten())
        self.teacher.append(teacher.detach().double().flatten())

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Places (n,), and embeddings (n, D_s) and (n, D_t)."""
        index, student, teacher = (dim_zero_cat(parts) for parts in (self.index, self.student, self.teacher))
        order = index.argsort(stable=True)
        return index[order], student.view(len(index), -1)[order], teacher.view(len(index), -1)[order]
