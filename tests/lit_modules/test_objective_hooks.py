"""What the framework gives an objective: its place, and teacher outputs as it has condensed them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_modules.distillation import Distillation
from lit_modules.nets import DeepNN, Outputs
from lit_modules.objectives import AttentionTransfer, Hinton, Objective, Sum, Term
from lit_modules.objectives.cross_entropy import ce_term
from tests.training import SHAPE, digits, fit, net


def module(**students: Objective) -> Distillation:
    made: Any = {name: (net(), objective) for name, objective in students.items()}
    return Distillation(net(DeepNN, seed=1), made, input_shape=SHAPE, samples=101)


class Seen(Objective):
    uses_teacher = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, student: Outputs, teacher: Outputs | None, labels: Tensor) -> dict[str, Term]:
        if student.logits.requires_grad and self.place.samples:
            self.seen.append(self.place)
        return {"ce": ce_term(student, labels, 1.0)}


def test_an_objective_knows_its_place() -> None:
    seen, within = Seen(), Seen()
    fit(module(a=seen, b=Sum([within])), digits())
    places, inner = ([place for place in each.seen if place.count > 3] for each in (seen, within))  # not of checks
    assert [place.step for place in places] == [place.step for place in inner] == list(range(6))
    assert [place.epoch for place in places] == [pytest.approx(step / 3) for step in range(6)]
    assert [place.progress for place in places] == [pytest.approx(step / 6) for step in range(6)]
    assert [place.count for place in places] == [37, 37, 27] * 2
    assert {place.samples for place in places} == {101}
    for epoch in (places[:3], places[3:]):
        assert sorted(torch.cat([place.index for place in epoch]).tolist()) == list(range(101))


def test_what_is_stored_is_condensed() -> None:
    stored = module(a=AttentionTransfer(), b=Hinton())._ask_teacher(torch.rand(5, *SHAPE))
    assert {key: tuple(x.shape) for key, x in stored.features.items()} == {
        "a>condensed.0": (5, 16),
        "a>condensed.1": (5, 4),
    }
