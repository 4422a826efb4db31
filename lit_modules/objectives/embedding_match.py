"""Embeddings that come to lie where the teacher's lie (EmbedDistill, Kim et al. 2023, arXiv:2301.12005)."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.objectives.base import Objective, Outputs, Term, weight
from lit_modules.objectives.search import Log, space

Distance = Literal["cosine", "l2", "mse"]
PROJECTED = "projected"  # the student's embeddings in the teacher's space, among the features


class ProjectedObjective(Objective):
    """An objective that compares embeddings in the teacher's space: (b, D) of samples, or (b, k, D) of rows of k texts.

    Where their widths differ, or `project` is true, a trained linear layer with bias leads there. It belongs to the
    method: it trains with the student, and is not exported.

    Args:
        project: whether there is such a layer; default: where the widths differ.
    """

    projection: nn.Module
    compares = frozenset({"embeddings", "scores"})

    def __init__(self, project: bool | None = None) -> None:
        super().__init__()
        self.project = project

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        assert teacher is not None
        if student.logits.dim() != teacher.logits.dim():
            raise BadInput(
                "", type(self).__name__, "a method of scores, such as ScoreKL: one of the nets gives no embeddings"
            )
        width, target = student.logits.shape[-1], teacher.logits.shape[-1]
        if width != target and self.project is False:
            raise BadInput("project", False, f"true: the student embeds in {width} values, the teacher in {target}")
        self.projection = nn.Linear(width, target) if self.project or width != target else nn.Identity()

    def adapt(self, student: Outputs) -> Outputs:
        """Add the embeddings (b, ..., D_t) in the teacher's space."""
        return student.with_features({PROJECTED: self.projection(student.logits)})


class EmbeddingMatch(ProjectedObjective):
    """match_weight * the distance of each embedding to the teacher's.

    `cosine` is 1 - cos(s, t), `l2` the length of s - t (both of EmbedDistill), `mse` its square, summed over the width:
    beside teachers of unit length the mean over D values is D times less, by which nothing is learned
    (sentence-transformers#1164).

    Args:
        distance: cosine, l2 or mse.
        match_weight: weight of the distance.
        project: see `ProjectedObjective`.

    Raises:
        BadInput: there is no such distance; embeddings are of other widths and `project` is false.
    """

    search = space(match_weight=Log(0.1, 10))

    def __init__(self, distance: Distance = "cosine", match_weight: float = 1.0, project: bool | None = None) -> None:
        super().__init__(project)
        if distance not in {"cosine", "l2", "mse"}:
            raise BadInput("distance", distance, "cosine, l2 or mse")
        self.distance, self.match_weight = distance, weight("match_weight", match_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        assert teacher is not None
        s, t = student.features[PROJECTED], teacher.logits
        if self.distance == "cosine":
            values = 1 - F.cosine_similarity(s, t, dim=-1)
        else:
            squares = (s - t).square().sum(-1)
            values = squares if self.distance == "mse" else _root(squares)
        return {self.distance: Term(values, self.match_weight)}


def _root(squares: Tensor) -> Tensor:
    """Return the square roots (b, ...), whose gradient at 0 is 0."""
    positive = squares > 0
    return squares.where(positive, 1.0).sqrt().where(positive, 0.0)
