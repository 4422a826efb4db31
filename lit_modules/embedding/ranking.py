"""How well queries find the texts that answer them, and how scores of pairs follow those of people.

All is computed in float64 and, of equal similarities, by the lower number, so that it does not depend on a batch. What
is not finite comes last.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_modules.embedding.neighbours import CHUNK

CUT = 10  # places of a ranking that count


class Corpus(NamedTuple):
    """Queries and documents among rows of texts, each once, in the order of their numbers."""

    queries: Tensor  # (m,) int64, places in the flattened rows
    documents: Tensor  # (N,) int64, likewise
    own: Tensor  # (m,) int64, the document that is the query itself; -1 if none is
    pairs: Tensor  # (p, 2) int64, of each query with a document that answers it
    query_of_row: Tensor  # (n,) int64


def find_corpus(numbers: Tensor) -> Corpus:
    """Find queries and documents in the numbers (n, k) of texts: the first of a row, and all others.

    The second text of a row answers its query. Of a text that comes several times the first counts.
    """
    rows, k = numbers.shape
    places = torch.arange(numbers.numel(), device=numbers.device).view(rows, k)
    queries, query_of_row, first = _distinct(numbers[:, 0], places[:, 0])
    documents, of_places, document_places = _distinct(numbers[:, 1:].flatten(), places[:, 1:].flatten())
    at = torch.searchsorted(documents, queries).clamp(max=len(documents) - 1)
    own = at.where(documents[at] == queries, -1)
    pairs = torch.stack([query_of_row, of_places.view(rows, k - 1)[:, 0]], 1).unique(dim=0)
    return Corpus(first, document_places, own, pairs, query_of_row)


def _distinct(numbers: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct numbers (m,), for each of all (n,) which it is, and the first place of each (m,)."""
    distinct, which = numbers.unique(return_inverse=True)
    first = places.new_full((len(distinct),), int(places.max())).scatter_reduce(0, which, places, "amin")
    return distinct, which, first


def rank_documents(queries: Tensor, documents: Tensor, corpus: Corpus) -> Tensor:
    """Return (p,) int64, from 1, the rank by cosine of each document that answers a query, among all documents.

    Embeddings (m, D) and (N, D). A query that is a document, too, leaves itself out, unless it answers itself.
    """
    q, d = F.normalize(queries.double()), F.normalize(documents.double())
    ranks = list[Tensor]()
    for query, answer in zip(*(x.split(CHUNK) for x in corpus.pairs.T), strict=True):
        rows, own = torch.arange(len(query), device=query.device), corpus.own[query]
        scores = q[query] @ d.T
        itself = (own >= 0) & (own != answer)
        scores[rows[itself], own[itself]] = -torch.inf
        ranks.append(_rank(scores, answer, torch.arange(len(d), device=d.device).expand_as(scores)))
    return torch.cat(ranks)


def rank_candidates(scores: Tensor, numbers: Tensor) -> Tensor:
    """Return (n,) int64, from 1, the rank of each row's first candidate by scores (n, c) of all, of these numbers."""
    return _rank(scores.double(), torch.zeros_like(numbers[:, 0]), numbers)


def _rank(scores: Tensor, answer: Tensor, numbers: Tensor) -> Tensor:
    """Return (n,), the ranks by scores (n, c) of the columns `answer` (n,), of equal ones by numbers (n, c)."""
    score, number = (x.gather(1, answer[:, None]) for x in (scores, numbers))
    after = (scores < score) | ((scores == score) & (numbers >= number))
    return 1 + (~after).sum(1)


def judge_ranks(ranks: Tensor, query: Tensor) -> dict[str, Tensor]:
    """Return values (m,) float64 of queries by name, given the ranks (p,) of answers to `query` (p,) int64, 0 to m - 1.

    `recall_1` and `recall_10` are the shares of a query's answers among the first, `mrr` is 1 / the rank of the first
    answer and `ndcg` the normalised discounted cumulative gain, both of the first ten.
    """
    counts = query.bincount()

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(counts, dtype=torch.float64).index_add(0, query, values.double())

    gains = 1 / (1 + torch.arange(1, CUT + 1, device=ranks.device, dtype=torch.float64)).log2()
    seen, best = ranks <= CUT, torch.full_like(counts, CUT + 1).scatter_reduce(0, query, ranks, "amin")
    return {
        "ndcg": total(gains[ranks.clamp(max=CUT) - 1] * seen) / gains.cumsum(0)[counts.clamp(max=CUT) - 1],
        "mrr": (1 / best.double()).where(best <= CUT, 0.0),
        "recall_1": total(ranks <= 1) / counts,
        "recall_10": total(seen) / counts,
    }


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Return () float64, the correlation of the ranks of values (n,) and (n,), equal ones with their mean rank.

    NaN if either is constant.
    """
    a, b = (_mean_ranks(values) - (len(values) - 1) / 2 for values in (x, y))
    correlation: Tensor = a @ b / (a.norm() * b.norm())
    return correlation


def _mean_ranks(values: Tensor) -> Tensor:
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0) - (counts + 1) / 2
    return ranks.double()[which]
