"""Rankings, and what they are worth, equal torchmetrics by query, SciPy and formulas that are written out."""

import math

import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics.functional.retrieval import (
    retrieval_normalized_dcg,
    retrieval_recall,
    retrieval_reciprocal_rank,
)

from lit_modules.embedding.ranking import find_corpus, judge_ranks, rank_candidates, rank_documents, spearman
from lit_modules.embedding.retrieval import Retrieval
from lit_modules.tasks.scores import Embeddings

# Queries 10 (of two rows), 3 and 7, which is a document, too; 5 comes twice and answers two queries.
NUMBERS = torch.tensor([[10, 5, 7], [3, 8, 5], [10, 1, 2], [7, 5, 9], [4, 4, 0]])


def embeddings(numbers: Tensor, width: int = 6, seed: int = 0) -> Tensor:
    """Equal vectors of equal texts, (n, k, D)."""
    table = torch.randn(int(numbers.max()) + 1, width, generator=torch.Generator().manual_seed(seed))
    return table.double()[numbers]


def test_queries_and_documents_are_distinct_texts() -> None:
    corpus, flat = find_corpus(NUMBERS), NUMBERS.flatten()
    assert flat[corpus.queries].tolist() == [3, 4, 7, 10]
    assert flat[corpus.documents].tolist() == [0, 1, 2, 4, 5, 7, 8, 9]
    assert corpus.documents[4] == 1  # the first place of text 5
    assert corpus.own.tolist() == [-1, 3, 5, -1]
    assert flat[corpus.queries][corpus.query_of_row].tolist() == NUMBERS[:, 0].tolist()
    found = {(int(flat[corpus.queries[q]]), int(flat[corpus.documents[d]])) for q, d in corpus.pairs}
    assert found == {(10, 5), (10, 1), (3, 8), (7, 5), (4, 4)}


@pytest.mark.parametrize("rows", [5, 60])
def test_values_of_queries_are_torchmetrics(rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = NUMBERS if rows == 5 else torch.randint(40, (rows, 3), generator=generator)
    x, corpus = embeddings(numbers), find_corpus(numbers)
    flat = x.flatten(0, 1)
    ranks = rank_documents(flat[corpus.queries], flat[corpus.documents], corpus)
    values = judge_ranks(ranks, corpus.pairs[:, 0])
    for q, place in enumerate(corpus.queries):
        scores = F.cosine_similarity(flat[place], flat[corpus.documents], dim=1)
        target = torch.zeros(len(scores), dtype=torch.bool)
        target[corpus.pairs[corpus.pairs[:, 0] == q, 1]] = True
        own = corpus.own[q]
        kept = torch.ones_like(target) if own < 0 or target[own] else torch.arange(len(target)) != own
        preds, target = scores[kept] + 2, target[kept]  # torchmetrics leaves out what is not above 0
        for name, expected in {
            "ndcg": retrieval_normalized_dcg(preds, target.long(), top_k=10),
            "mrr": retrieval_reciprocal_rank(preds, target, top_k=10),
            "recall_1": retrieval_recall(preds, target, top_k=1),
            "recall_10": retrieval_recall(preds, target, top_k=10),
        }.items():
            assert float(values[name][q]) == pytest.approx(float(expected), abs=1e-6)


def test_of_equal_scores_the_lower_number_comes_first_and_nan_last() -> None:
    numbers = torch.tensor([[0, 2, 1], [3, 4, 5]])
    same = torch.ones(2, 3, 4, dtype=torch.float64)
    corpus = find_corpus(numbers)  # documents 1, 2, 4, 5
    ranks = rank_documents(same[:, 0], same.flatten(0, 1)[corpus.documents], corpus)
    assert ranks.tolist() == [2, 3]
    assert rank_candidates(torch.ones(2, 2), numbers[:, 1:]).tolist() == [2, 1]
    nothing = torch.full_like(same, torch.nan).flatten(0, 1)
    assert rank_documents(nothing[:2], nothing[corpus.documents], corpus).tolist() == [5, 5]
    assert rank_candidates(torch.tensor([[torch.nan, 0.0]]), numbers[:1, 1:]).tolist() == [3]


def test_correlations_are_scipys() -> None:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(50, generator=generator), torch.randint(5, (50,), generator=generator)
    assert float(spearman(x, y)) == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-12)
    assert math.isnan(spearman(x, torch.ones(50)))


def scored(task: Retrieval, numbers: Tensor, student: Tensor, teacher: Tensor) -> tuple[dict, dict]:
    """Values of the whole, and of rows, with rows in another order and in two batches."""
    scores = task.scores()
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))
    for rows in order.split(3):
        scores.index = rows
        scores.update(Embeddings(student[rows], teacher[rows]), numbers[rows])
    return scores.compute(), scores.of_all_samples()


def test_a_part_is_judged_by_its_queries() -> None:
    student, teacher = embeddings(NUMBERS), embeddings(NUMBERS, seed=1)
    values, rows = scored(Retrieval(3), NUMBERS, student, teacher)
    corpus = find_corpus(NUMBERS)
    texts = student.flatten(0, 1)
    for name, documents in (("ndcg", texts), ("ndcg_teacher", teacher.flatten(0, 1))):
        ranks = rank_documents(texts[corpus.queries], documents[corpus.documents], corpus)
        expected = judge_ranks(ranks, corpus.pairs[:, 0])["ndcg"]
        assert float(values[name]) == pytest.approx(float(expected.mean()), abs=1e-12)
    kept = Retrieval(3).keep_samples({name: x.numpy() for name, x in rows.items()})["query_ndcg"]
    assert len(kept) == 4  # queries, not rows
    assert kept.mean() == pytest.approx(float(values["ndcg"]), abs=1e-12)
    cosines = F.cosine_similarity(student[:, :1], student[:, 1:], dim=2)
    places = [1 + int(row[1] > row[0]) for row in cosines]
    assert float(values["rerank"]) == pytest.approx(sum(1 / place for place in places) / 5, abs=1e-12)


def test_widths_may_differ_and_a_net_may_score_pairs() -> None:
    values, _ = scored(Retrieval(3), NUMBERS, embeddings(NUMBERS), embeddings(NUMBERS, width=4))
    assert "ndcg_teacher" not in values
    scores = torch.tensor([[2.0, 1.0], [1.0, 2.0], [0.0, 3.0], [5.0, 4.0], [1.0, 1.0]]).double()
    values, rows = scored(Retrieval(3), NUMBERS, scores, embeddings(NUMBERS))
    assert float(values["rerank"]) == float(values["mrr"]) == pytest.approx((1 + 0.5 + 0.5 + 1 + 0.5) / 5)
    assert float(values["recall_1"]) == pytest.approx(0.4)
    assert float(values["ndcg"]) == pytest.approx((2 + 3 / math.log2(3)) / 5)
    assert rows["unit"].tolist() == [*range(5)]


def test_pairs_with_scores_are_judged_by_these() -> None:
    numbers, human = NUMBERS[:, :2], torch.tensor([3.0, 1.0, 1.0, 5.0, 2.0])
    task = Retrieval(2, scored=True)
    task._human = {"test": human}.get
    x = embeddings(numbers)
    values, rows = scored(task, numbers, x, x)
    cosines = F.cosine_similarity(x[:, 0], x[:, 1], dim=1)
    assert float(values["spearman"]) == pytest.approx(scipy.stats.spearmanr(cosines, human).statistic, abs=1e-12)
    assert task.metric.name == "test_spearman"
    assert float(values["loss"]) == 0
    assert not task.keep_samples({name: y.numpy() for name, y in rows.items()})


def test_single_texts_are_judged_by_neighbours() -> None:
    numbers = torch.arange(30)[:, None]
    task, x = Retrieval(1), embeddings(numbers)
    values, rows = scored(task, numbers, x, x)
    assert float(values["neighbours"]) == 1
    assert task.metric.name == "test_neighbours"
    assert task.keep_samples({name: y.numpy() for name, y in rows.items()})["shared"].tolist() == [1.0] * 30
