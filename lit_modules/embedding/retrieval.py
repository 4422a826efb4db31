"""Rows of texts: nets embed each, or score pairs, and are judged by what queries find."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.embedding.neighbours import difference_of_cosines, shared_neighbours
from lit_modules.embedding.ranking import (
    find_corpus,
    judge_ranks,
    rank_candidates,
    rank_documents,
    spearman,
)
from lit_modules.embedding.task import SHARED, Embedding
from lit_modules.nets.outputs import SCORES
from lit_modules.tasks.base import Metric
from lit_modules.tasks.scores import Embeddings, Gathered, Scored, Scores

HumanScores = Callable[[str], Tensor | None]  # of the pairs of a part (n,), by its name
TEMPERATURE = 0.05  # by which cosines are divided in the loss of labels
QUERIES = ("ndcg", "mrr", "recall_1", "recall_10")
NDCG = Metric(
    name="test_ndcg", tested=tuple(f"test_{name}" for name in QUERIES),
    columns={"test_ndcg": "nDCG@10, %", "test_recall_1": "recall@1, %", "test_recall_10": "recall@10, %"},
    word="nDCG@10", title="nDCG@10 of queries, %", chart="validation, nDCG@10 of queries", unit="points",
    higher_is_better=True, scale=100.0, digits=2, counted="rows", drawn="queries", limits=(0.0, 100.0),
    of_samples="test_query_ndcg", beside=("test_ndcg_teacher", "test_rerank"), baseline="untrained",
)  # fmt: skip
SPEARMAN = Metric(
    name="test_spearman", tested=("test_spearman",), columns={"test_spearman": "Spearman, × 100"},
    word="Spearman's correlation", title="Spearman's correlation with the scores of people, × 100",
    chart="validation, Spearman's correlation", unit="points", higher_is_better=True, scale=100.0, digits=2,
    counted="pairs", limits=(-100.0, 100.0), baseline="untrained",
)  # fmt: skip


class Retrieval(Embedding):
    """Rows of k texts, whose labels (b, k) number the distinct ones; nets give (b, k, D), or scores (b, k - 1).

    Queries, the first texts of rows, look among all others of the part for the second ones of their rows. Pairs with
    human scores are judged by the correlation with these, single texts by the neighbours that they share with a
    teacher's. Nets that score pairs rank the candidates of a row alone.

    Args:
        texts: k.
        scored: whether people have scored the pairs.
    """

    metrics: ClassVar[Mapping[str, Metric]] = MappingProxyType(
        {"ndcg": NDCG, "spearman": SPEARMAN, "neighbours": SHARED}
    )
    parts = "lit_modules.embedding.parts.RetrievalParts"
    outputs = SCORES
    net = "lit_modules.nets.embedder.TextEmbedder"
    relates_rows = True

    def __init__(self, texts: int = 2, scored: bool = False) -> None:
        super().__init__()
        self.texts, self.scored = texts, scored
        self.metric = self.metrics["spearman" if scored else "ndcg" if texts > 1 else "neighbours"]
        self._human: HumanScores | None = None  # of the data module; a checkpoint has none

    @classmethod
    def of_data(cls, data: Any, metric: Any = None) -> "Retrieval":
        task = cls(data.label_shape[0], scored=data.scores("test") is not None)
        task._human = data.scores if task.scored else None
        if metric not in {None, task.metric.score}:
            raise BadInput("metric", metric, f"not allowed with `data {data.name}`, judged by {task.metric.word}")
        return task

    def scores(self) -> "RetrievalScores":
        return RetrievalScores(self.texts, self.scored, self._human)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The cross-entropy (B,) of each query's answer among all candidates of the global batch.

        Softmax of cosines / 0.05; the answers to an equal query, and equal texts, are left out (Henderson et al.
        2017, arXiv:1705.00652, "multiple negatives"). BadInput for rows without an answer, or nets that score pairs.
        """
        if self.texts < 2 or self.scored or is_scores(logits):
            what = "a cross-encoder" if is_scores(logits) else "these rows"
            raise BadInput("teacher", "a new net", f"one that is loaded: {what} can't be trained from pairs")
        units = F.normalize(logits, dim=2)
        equal = (labels[:, :1] == labels[:, 0]).to(logits)  # queries (B, B)
        answers = (labels[:, 1:2] == labels[:, 1:].flatten()).to(logits)  # (B, B * (k - 1)), which candidates they are
        own = torch.arange(len(labels), device=labels.device) * (self.texts - 1)
        leave_out = (equal @ answers > 0).scatter(1, own[:, None], False)
        cosines = units[:, 0] @ units[:, 1:].flatten(0, 1).T
        return F.cross_entropy(cosines.masked_fill(leave_out, -torch.inf) / TEMPERATURE, own, reduction="none")

    def label_shape(self, outputs: Tensor) -> tuple[int, ...]:
        rows, texts = outputs.shape[:2]
        return rows, texts + is_scores(outputs)

    def keep_samples(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The nDCG of each query, or the shared neighbours of each text; nothing of pairs."""
        if "shared" in values:
            return super().keep_samples(values)
        if "ndcg" not in values:
            return {}
        _, first = np.unique(values["unit"], return_index=True)
        return {"query_ndcg": values["ndcg"][np.sort(first)]}


class RetrievalScores(Scores):
    """What a part's rows of texts say of a net, and as `loss` how far it is from its teacher.

    That is the mean squared difference of the cosines of all pairs of texts or, if a net scores pairs, of the scores of
    candidates.
    """

    trained = ()
    sampled = ()

    def __init__(self, texts: int, scored: bool, human: HumanScores | None = None) -> None:
        super().__init__()
        self.texts, self.human = texts, human
        self.gathered = Gathered("numbers", "student", "teacher")
        if scored:
            self.names = ("spearman",)
        elif texts > 1:
            self.names = (*QUERIES, "ndcg_teacher", *(("rerank",) if texts > 2 else ()))
        else:
            self.names = ("neighbours",)

    def update(self, logits: Scored, labels: Tensor) -> None:
        assert isinstance(logits, Embeddings)
        self.gathered.update(self.index, numbers=labels, student=logits.student, teacher=logits.teacher)

    def compute(self) -> dict[str, Tensor]:
        places, numbers, student, teacher = self._rows()
        values = {"loss": _distance(student, teacher)}
        if self.names == ("spearman",):
            human = self.human(self.part) if self.human is not None else None
            values["spearman"] = torch.nan * values["loss"]
            if human is not None:
                values["spearman"] = spearman(candidate_scores(student)[:, 0], human.to(student.device)[places])
            return values
        return values | {name: x.mean() for name, x in self._judge(numbers, student, teacher)[0].items()}

    def of_all_samples(self) -> dict[str, Tensor]:
        places, numbers, student, teacher = self._rows()
        if self.names == ("neighbours",):
            return {"place": places, "shared": shared_neighbours(student[:, 0], teacher[:, 0])}
        if "ndcg" not in self.names:
            return {"place": places}
        values, query_of_row = self._judge(numbers, student, teacher)
        return {"place": places, "unit": query_of_row, "ndcg": values["ndcg"][query_of_row]}

    def per_label(self, logits: Tensor, labels: Tensor, ce: Tensor | None = None) -> dict[str, Tensor]:
        return {}

    def _rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return places (n,), numbers (n, k), and outputs of student and teacher, (n, k, D) or (n, k - 1)."""
        gathered = self.gathered.compute()
        student, teacher = (
            x if x.shape[1] == self.texts - 1 else x.unflatten(1, (self.texts, -1))
            for x in (gathered["student"], gathered["teacher"])
        )
        return gathered["place"], gathered["numbers"].long(), student, teacher

    def _judge(self, numbers: Tensor, student: Tensor, teacher: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Return values of queries by name, (m,), and the query of each row, (n,)."""
        if self.texts == 1:
            return {"neighbours": shared_neighbours(student[:, 0], teacher[:, 0])}, numbers[:, 0]
        in_rows = rank_candidates(candidate_scores(student), numbers[:, 1:])
        if is_scores(student):
            query = torch.arange(len(numbers), device=numbers.device)
            values = judge_ranks(in_rows, query)
        else:
            corpus = find_corpus(numbers)
            query, texts = corpus.query_of_row, student.flatten(0, 1)
            ranks = rank_documents(texts[corpus.queries], texts[corpus.documents], corpus)
            values = judge_ranks(ranks, corpus.pairs[:, 0])
            if student.shape == teacher.shape:
                documents = teacher.flatten(0, 1)[corpus.documents]
                ranks = rank_documents(texts[corpus.queries], documents, corpus)
                values["ndcg_teacher"] = judge_ranks(ranks, corpus.pairs[:, 0])["ndcg"]
        if "rerank" in self.names:
            values["rerank"] = 1 / in_rows.double()
        return values, query


def is_scores(outputs: Tensor) -> bool:
    """Return whether these are scores (n, k - 1) of pairs, not embeddings (n, k, D)."""
    return outputs.dim() == 2


def candidate_scores(outputs: Tensor) -> Tensor:
    """Return the scores (n, k - 1) of a row's candidates: those of a net, or cosines of its embeddings (n, k, D)."""
    if is_scores(outputs):
        return outputs
    units = F.normalize(outputs.double(), dim=2)
    return (units[:, :1] * units[:, 1:]).sum(2)


def _distance(student: Tensor, teacher: Tensor) -> Tensor:
    if is_scores(student) or is_scores(teacher):
        return (candidate_scores(student) - candidate_scores(teacher)).square().mean()
    return difference_of_cosines(student.flatten(0, 1), teacher.flatten(0, 1))
