"""What the pipeline is made of: stages that are balanced, tensors that travel."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from strategies.base import stages
from strategies.pipeline import cutting
from strategies.pipeline.buffers import Layout, Packing
from strategies.pipeline.placement import StagePlacement
from tests.pipelines import Clock, Plain, Slow, ended, pipeline, placed
from tests.training import assert_same


def test_no_other_cut_has_a_cheaper_dearest_stage() -> None:
    generator = random.Random(0)
    for _ in range(30):
        costs = [generator.choice([0.0, 1.0, 2.5, 7.0]) for _ in range(generator.randint(3, 7))]
        for count in (1, 2, 3):
            sizes = stages.sizes_by_cost(costs, range(count))
            cuts = [(0, *inner, len(costs)) for inner in itertools.combinations(range(1, len(costs)), count - 1)]
            dearest = min(max(sum(costs[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)
            begins = [0, *itertools.accumulate(sizes)]
            assert sum(sizes) == len(costs)
            assert min(sizes) > 0
            assert max(sum(costs[a:b]) for a, b in itertools.pairwise(begins)) == pytest.approx(dearest)


@pytest.mark.parametrize("rank_of", [[0, 1, 1, 0], [0, 1, 0, 1]], ids=["V", "loop"])
def test_ranks_with_several_stages_are_balanced(rank_of: list[int]) -> None:
    generator = random.Random(1)

    def busiest(ends: Sequence[int], costs: Sequence[float]) -> float:
        loads = [0.0, 0.0]
        for (begin, end), rank in zip(itertools.pairwise([0, *ends]), rank_of, strict=True):
            loads[rank] += sum(costs[begin:end])
        return max(loads)

    gained = 0.0
    for _ in range(20):
        costs = [generator.uniform(1, 4) for _ in range(12)]
        sizes = stages.sizes_by_cost(costs, rank_of)
        by_stage = stages.sizes_by_cost(costs, range(4))
        found, before = (busiest([*itertools.accumulate(each)], costs) for each in (sizes, by_stage))
        least = min(busiest([*cut, 12], costs) for cut in itertools.combinations(range(1, 12), 3))
        assert min(sizes) > 0
        assert found <= min(before, 1.1 * least)
        gained += before - found
    assert gained > 0


class Asked(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked = x.requires_grad
        return super().forward(x)


def test_layers_are_timed_as_in_training_where_a_batch_asks_for_no_gradient() -> None:
    layers = [Asked(3, 3), Asked(3, 3)]
    assert len(cutting.seconds(layers, (torch.ones(2, 3),))) == 2
    assert [layer.asked for layer in layers] == [False, True]


class Uneven(Plain):
    """Some layers take all the time, another has nearly all parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), *(Slow() for _ in range(4)), nn.Linear(32, 32), nn.Linear(32, 3))


@pytest.mark.parametrize(("balance", "slow"), [("parameters", [1, 2, 3, 4]), ("time", [1, 2]), ([2, 5], [1])])
def test_stages_are_balanced_by_what_is_asked_for(
    balance: Any, slow: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strategies.pipeline.cutting.time", Clock())
    notes = placed(tmp_path / "names")
    both, _ = ended(Uneven, pipeline(balance=balance), max_epochs=1, callbacks=[notes])
    assert notes.of_ranks()[0] == [["net.0.weight", "net.0.bias", *(f"net.{n}.scale" for n in slow)]]
    assert_same(both, ended(Uneven, max_epochs=1)[0], atol=1e-9)  # measuring has left no trace


def test_parcels_carry_any_tensors_and_their_gradients() -> None:
    torch.manual_seed(0)
    a = torch.randn(3, 4, 5, 6, dtype=torch.float64).to(memory_format=torch.channels_last).requires_grad_()
    b = torch.randn(3, 7, dtype=torch.bfloat16, requires_grad=True)
    c, d = torch.randint(0, 9, (3, 2)), torch.randn(5, 3).t()
    packing = Packing([Layout.of(x) for x in (a, b, c, d)], 5)
    parcel = packing.pack((a, b, c, d), torch.zeros((), requires_grad=True))
    arrived = parcel.detach().requires_grad_()
    found = packing.unpack(arrived, 3)
    for sent, x in zip((a, b, c, d), found, strict=True):
        assert torch.equal(sent, x)
        assert sent.stride() == x.stride()
        assert x.requires_grad == sent.requires_grad
    (found[0].relu_() * 2).sum().backward()  # works in place, and leaves b out
    parcel.backward(arrived.grad)
    assert torch.equal(a.grad, 2.0 * (a.detach() > 0))
    assert a.grad.stride() == a.stride()
    assert torch.equal(b.grad, torch.zeros_like(b))
    with pytest.raises(
        ValueError, match=r"expected a stage to give \(rows, 4, 5, 6\) float64 .* got \(rows, 2\) int64"
    ):
        packing.pack((c,), a)


def test_a_state_under_other_names_is_refused() -> None:
    placement = StagePlacement.__new__(StagePlacement)
    placement._names, placement.owners = {}, {}
    placement.group = None
    with pytest.raises(ValueError, match="state_dict: expected parameters under their own names; renamed is none's"):
        placement.full_state({"renamed": torch.empty(2, device="meta")})
