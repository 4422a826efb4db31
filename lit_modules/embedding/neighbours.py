"""What embeddings are judged by: the nearest neighbours that they share with a teacher's, and what these tell.

All is computed in float64 and, of equal similarities, by the lower place, so that it does not depend on a batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = 10  # of a sample, of which the shared ones are counted
VOTERS = 20  # of a sample, which say its class
TEMPERATURE = 0.07  # of their votes (Wu et al. 2018, arXiv:1805.01978)
CHUNK = 1024  # samples whose similarities are held at once
# Strengths of the probe's penalty, in units of the embeddings' mean square.
PENALTIES = tuple(10.0**exponent for exponent in range(-6, 3))


def nearest(queries: Tensor, bank: Tensor, count: int, same: bool = False) -> tuple[Tensor, Tensor]:
    """Return the places (n, count) in a bank (m, D) of the most similar to queries (n, D), and their cosines.

    With `same` the bank begins with the queries, and each leaves itself out.
    """
    parts = list(_nearest(queries, bank, min(count, len(bank) - same), same))
    return torch.cat([places for places, _ in parts]), torch.cat([cosines for _, cosines in parts])


def _nearest(queries: Tensor, bank: Tensor, count: int, same: bool) -> Iterator[tuple[Tensor, Tensor]]:
    units, of_bank = F.normalize(queries.double()), F.normalize(bank.double())
    for start in range(0, len(units), CHUNK):
        cosines = units[start : start + CHUNK] @ of_bank.T
        if same:
            rows = torch.arange(len(cosines), device=cosines.device)
            cosines[rows, start + rows] = -torch.inf
        ordered, places = cosines.sort(dim=1, descending=True, stable=True)
        yield places[:, :count], ordered[:, :count]


def shared_neighbours(student: Tensor, teacher: Tensor, count: int = NEIGHBOURS) -> Tensor:
    """Return (n,) float64, the share of each sample's nearest neighbours by a teacher that a student has, too.

    Embeddings (n, D_s) and (n, D_t) of the same samples, at least two; the widths may differ.
    """
    ours, theirs = (nearest(x, x, count, same=True)[0] for x in (student, teacher))
    return (ours[:, :, None] == theirs[:, None, :]).any(2).double().mean(1)


def difference_of_cosines(student: Tensor, teacher: Tensor) -> Tensor:
    """Return () float64, the mean over all pairs of samples of the squared difference of their cosines.

    Embeddings (n, D_s) and (n, D_t).
    """
    s, t = F.normalize(student.double()), F.normalize(teacher.double())
    squares = [(s[i : i + CHUNK] @ s.T - t[i : i + CHUNK] @ t.T).square().sum() for i in range(0, len(s), CHUNK)]
    return torch.stack(squares).sum() / len(s) ** 2


def vote(queries: Tensor, bank: Tensor, labels: Tensor, classes: int, count: int = VOTERS) -> Tensor:
    """Return (n,) int64, the classes of queries (n, D) by the votes exp(cos / 0.07) of their nearest in a bank (m, D).

    `labels` (m,) are the bank's.
    """
    places, cosines = nearest(queries, bank, count)
    votes = torch.zeros(len(queries), classes, dtype=torch.float64, device=queries.device)
    votes.scatter_add_(1, labels[places], (cosines / TEMPERATURE).exp())
    return votes.argmax(1)


def probe(queries: Tensor, bank: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return (n,) int64, the classes of queries (n, D) by a linear map fitted to a bank (m, D) with labels (m,).

    The map is that of ridge regression on classes as 0 and 1, with a bias; the penalty is the one of `PENALTIES` whose
    leave-one-out error on the bank is least, which has a closed form.
    """
    x, y = bank.double(), F.one_hot(labels, classes).double()
    mean, mean_y = x.mean(0), y.mean(0)
    u, s, v = torch.linalg.svd(x - mean, full_matrices=False)
    projected, scale = u.T @ (y - mean_y), float(s.square().mean().clamp(min=torch.finfo(s.dtype).tiny))
    errors = []
    for penalty in PENALTIES:
        shrunk = s.square() / (s.square() + penalty * scale)  # (r,)
        residual = y - mean_y - u @ (shrunk[:, None] * projected)
        leverage = 1 / len(x) + u.square() @ shrunk  # (m,), of the bias and of the map
        errors.append(float((residual / (1 - leverage).clamp(min=1e-12)[:, None]).square().mean()))
    best = PENALTIES[errors.index(min(errors))] * scale
    weight = v.T @ ((s / (s.square() + best))[:, None] * projected)
    scores: Tensor = (queries.double() - mean) @ weight + mean_y  # (n, classes)
    return scores.argmax(1)
