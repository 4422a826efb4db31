"""Scores of a query's candidates that come to be a teacher's: from embeddings, or from nets that score pairs."""

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.objectives.base import Objective, Outputs, Term, check_temperature, kl, weight
from lit_modules.objectives.search import Log, space

Similarity = Literal["dot", "cosine"]
Candidates = Literal["row", "batch"]
EMBEDDED = 3  # dimensions of embeddings (b, k, D)


class ScoreObjective(Objective):
    """An objective that compares the scores of a row's candidates, its second text and those that follow.

    Of a net that embeds texts, (b, k, D), a score is the product of the embeddings of query and candidate; a
    cross-encoder gives scores (b, k - 1) itself. Teacher and student may be one of each.

    Attributes:
        fewest: candidates that a row needs.
        why: what they are for.

    Args:
        similarity: of embeddings: `dot`, their product, or `cosine`.

    Raises:
        BadInput: there is no such similarity; in `build`, rows have too few candidates.
    """

    compares = frozenset({"scores"})
    fewest = 2
    why = ""

    def __init__(self, similarity: Similarity = "dot") -> None:
        super().__init__()
        if similarity not in {"dot", "cosine"}:
            raise BadInput("similarity", similarity, "dot or cosine")
        self.similarity = similarity

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        assert teacher is not None
        candidates = _count(student)
        if candidates < self.fewest:
            expected = f"rows with at least {self.fewest} candidates{self.why}; these have {candidates}"
            raise BadInput("", type(self).__name__, expected)
        if candidates != _count(teacher):
            expected = f"a teacher that scores {candidates} candidates a row; it gives {_count(teacher)}"
            raise BadInput("", type(self).__name__, expected)

    def scores(self, outputs: Outputs) -> Tensor:
        """Return the scores (b, k - 1) of a row's candidates."""
        if not _embeds(outputs):
            return outputs.logits
        texts = self._texts(outputs)
        return (texts[:, :1] * texts[:, 1:]).sum(2)

    def _texts(self, outputs: Outputs) -> Tensor:
        """Return embeddings (b, k, D) whose products are scores."""
        return F.normalize(outputs.logits, dim=2) if self.similarity == "cosine" else outputs.logits


class MarginMSE(ScoreObjective):
    """margin_weight * mean over negatives of ((s+ - s-) - (t+ - t-))^2, of scores of student and teacher.

    The first candidate is the positive, the others are negatives. Scores of student and teacher need no common zero,
    but a common scale: dot products beside probabilities teach little (sentence-transformers#3540).

    Source: Hofstätter et al. 2020, "Improving Efficient Neural Ranking Models with Cross-Architecture Knowledge
    Distillation" (arXiv:2010.02666), equation 2.

    Args:
        margin_weight: weight of the squared difference of margins.
        similarity: that of ScoreObjective.
    """

    search = space(margin_weight=Log(0.1, 10))
    why = ", a positive and a negative"

    def __init__(self, margin_weight: float = 1.0, similarity: Similarity = "dot") -> None:
        super().__init__(similarity)
        self.margin_weight = weight("margin_weight", margin_weight)

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        assert teacher is not None
        of_student, of_teacher = (scores[:, :1] - scores[:, 1:] for scores in map(self.scores, (student, teacher)))
        return {"margin": Term((of_student - of_teacher).square().mean(1), self.margin_weight)}


class ScoreKL(ScoreObjective):
    """score_weight * T_s^2 * KL(softmax(t / T_t) || softmax(s / T_s)) over the scores of a query's candidates.

    The loss of sentence-transformers' `DistillKLDivLoss`.

    Args:
        temperature: T_s, which divides the student's scores.
        teacher_temperature: T_t; default: as the student's.
        candidates: `row`, those of the query's own row, or `batch`, those of all rows of the global batch, for which
            both nets have to embed.
        score_weight: weight of the divergence.
        similarity: that of ScoreObjective.
    """

    search = space(temperature=Log(0.02, 2))

    def __init__(
        self,
        temperature: float = 1.0,
        teacher_temperature: float | None = None,
        candidates: Candidates = "row",
        score_weight: float = 1.0,
        similarity: Similarity = "dot",
    ) -> None:
        super().__init__(similarity)
        if candidates not in {"row", "batch"}:
            raise BadInput("candidates", candidates, "row or batch")
        self.temperature = self.teacher_temperature = check_temperature(temperature)
        if teacher_temperature is not None:
            self.teacher_temperature = check_temperature(teacher_temperature)
        self.score_weight = weight("score_weight", score_weight)
        self.relates_rows = candidates == "batch"
        if self.relates_rows:
            self.fewest, self.fewest_related = 1, 2
        else:
            self.why = ", or `candidates batch`"

    def build(self, student: Outputs, teacher: Outputs | None) -> None:
        super().build(student, teacher)
        assert teacher is not None
        if self.relates_rows and not (_embeds(student) and _embeds(teacher)):
            raise BadInput("candidates", "batch", "row: a cross-encoder scores the candidates of a row alone")

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        assert teacher is not None
        log_s = (self.scores(student) / self.temperature).log_softmax(1)
        log_t = (self.scores(teacher) / self.teacher_temperature).log_softmax(1)
        return {"score": Term(kl(log_t, log_s) * self.temperature**2, self.score_weight)}

    def scores(self, outputs: Outputs) -> Tensor:
        """Return scores (b, k - 1) or, with candidates of the batch, (B, B * (k - 1))."""
        if not self.relates_rows:
            return super().scores(outputs)
        texts = self._texts(outputs)
        return texts[:, 0] @ texts[:, 1:].flatten(0, 1).T


def _embeds(outputs: Outputs) -> bool:
    return outputs.logits.dim() == EMBEDDED


def _count(outputs: Outputs) -> int:
    """Return how many candidates a row has."""
    return outputs.logits.shape[1] - _embeds(outputs)
