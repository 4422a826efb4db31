"""What neighbours tell equals what is written out sample by sample, in any order and in chunks of any size."""

import math

import pytest
import torch
from torch import Tensor

from lit_modules.embedding import neighbours
from lit_modules.embedding.neighbours import difference_of_cosines, nearest, probe, shared_neighbours, vote


def draw(seed: int, rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def by_hand(query: Tensor, bank: Tensor, count: int, but: int = -1) -> list[int]:
    places = [place for place in range(len(bank)) if place != but]
    return sorted(places, key=lambda place: (-cosine(query, bank[place]), place))[:count]


def test_shared_neighbours_are_those_of_both() -> None:
    s, t = draw(0, 23, 5), draw(1, 23, 9)
    shared = [len({*by_hand(s[i], s, 4, i)} & {*by_hand(t[i], t, 4, i)}) / 4 for i in range(23)]
    assert shared_neighbours(s, t, 4).tolist() == shared
    assert shared_neighbours(3 * t, t).tolist() == [1.0] * 23  # lengths don't count
    few = shared_neighbours(s[:4], t[:4])  # three neighbours at most, and all are shared
    assert few.tolist() == [1.0] * 4


def test_chunks_and_order_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    s, t, order = draw(0, 23, 5), draw(1, 23, 9), torch.randperm(23, generator=torch.Generator().manual_seed(2))
    whole, difference = shared_neighbours(s, t), difference_of_cosines(s, t)
    monkeypatch.setattr(neighbours, "CHUNK", 7)
    assert torch.equal(shared_neighbours(s, t), whole)
    assert torch.equal(shared_neighbours(s[order], t[order]), whole[order])
    torch.testing.assert_close(difference_of_cosines(s, t), difference)
    pairs = [(cosine(s[i], s[j]) - cosine(t[i], t[j])) ** 2 for i in range(23) for j in range(23)]
    assert float(difference) == pytest.approx(sum(pairs) / 23**2, abs=1e-12)


def test_equal_samples_are_near_in_the_order_of_their_places() -> None:
    bank = torch.ones(5, 3)
    places, _ = nearest(bank, bank, 2, same=True)
    assert places.tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]


def test_votes_are_those_of_the_nearest() -> None:
    bank, queries = draw(0, 40, 5), draw(1, 11, 5)
    labels = torch.arange(40) % 3
    for query, predicted in zip(queries, vote(queries, bank, labels, 3, count=7), strict=True):
        votes = [0.0] * 3
        for place in by_hand(query, bank, 7):
            votes[int(labels[place])] += math.exp(cosine(query, bank[place]) / 0.07)
        assert int(predicted) == votes.index(max(votes))


def test_the_probe_is_the_ridge_regression_with_the_least_error_left_out() -> None:
    bank, queries = draw(0, 30, 4), draw(1, 50, 4)
    labels = (bank[:, 0] + 0.5 * bank[:, 1] > 0).long()
    y = torch.nn.functional.one_hot(labels, 2).double()
    scale = float(torch.linalg.svdvals(bank - bank.mean(0)).square().mean())

    def fit(x: Tensor, target: Tensor, penalty: float) -> tuple[Tensor, Tensor]:
        """Least squares with a penalty on all but the bias."""
        ones = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        ridge = penalty * torch.diag(torch.tensor([1.0] * x.shape[1] + [0.0], dtype=x.dtype))
        solution = torch.linalg.solve(ones.T @ ones + ridge, ones.T @ target)
        return solution[:-1], solution[-1]

    errors = []
    for strength in neighbours.PENALTIES:
        error = 0.0
        for i in range(30):
            rest = torch.arange(30) != i
            weight, bias = fit(bank[rest], y[rest], strength * scale)
            error += float((bank[i] @ weight + bias - y[i]).square().sum())
        errors.append(error)
    weight, bias = fit(bank, y, neighbours.PENALTIES[errors.index(min(errors))] * scale)
    assert torch.equal(probe(queries, bank, labels, 2), (queries @ weight + bias).argmax(1))
