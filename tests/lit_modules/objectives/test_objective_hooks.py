"""What the framework gives an objective: its place, condensed teacher outputs, values to search."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_modules import objectives
from lit_modules.distillation import Distillation
from lit_modules.nets import Outputs
from lit_modules.objectives import AttentionTransfer, Hinton, Objective, Sum, Term
from lit_modules.objectives.context import NO_STEP, StepContext
from lit_modules.objectives.cross_entropy import ce_term
from lit_modules.objectives.search import Choice, Linear, Log
from tests.training import SHAPE, digits, distil, fit


def module(**students: Objective) -> Distillation:
    return distil(students, samples=101)


class Seen(Objective):
    uses_teacher = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(
        self, student: Outputs, teacher: Outputs | None, labels: Tensor, context: StepContext = NO_STEP
    ) -> dict[str, Term]:
        if student.logits.requires_grad and context.samples:
            self.seen.append(context)
        return {"ce": ce_term(student, labels, 1.0)}


def test_an_objective_is_told_where_training_is() -> None:
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
    stored = module(a=AttentionTransfer(), b=Hinton()).ask_teacher(torch.rand(5, *SHAPE))
    assert stored.features == {}
    assert {path: tuple(x.shape) for path, x in stored.condensed.items()} == {
        ("a", "condensed.0"): (5, 16),
        ("a", "condensed.1"): (5, 4),
    }


ABSTRACT = {"Objective", "FeatureObjective", "LogitObjective", "EmbeddingObjective", "StagesObjective", "TextObjective"}
NEEDED = {"DML": {"peers": ["b"]}, "Sum": {"objectives": [objectives.Hinton()]}}
METHODS = [name for name in objectives.__all__ if name not in {*ABSTRACT, "Place", "Term"}]


@pytest.mark.parametrize("name", METHODS)
def test_a_space_has_the_default_and_every_value_in_it_builds(name: str) -> None:
    method = getattr(objectives, name)
    options = inspect.signature(method).parameters
    for option, space in method.search.items():
        assert options[option].default in space
        for place in (0.0, 0.25, 0.5, 0.999, 1.0):
            value = space.at(place)
            assert value in space
            assert getattr(method(**{option: value}, **NEEDED.get(name, {})), option) == value


def test_only_methods_without_weights_have_no_space() -> None:
    without = ["SequenceLevel", "SimKD", "Sum", "Untrained"]
    assert [name for name in METHODS if not getattr(objectives, name).search] == without


def test_values_are_spread_as_the_space_says() -> None:
    assert [Log(0.01, 100).at(u) for u in (0, 0.25, 0.5, 0.75, 1)] == [0.01, 0.1, 1, 10, 100]
    assert [Linear(0, 0.3).at(u) for u in (0, 0.5, 1)] == [0, 0.15, 0.3]
    assert [Choice(("a", "b", "c")).at(u) for u in (0, 0.33, 0.34, 0.99, 1)] == ["a", "a", "b", "c", "c"]
    assert "a" not in Linear(0, 1)
