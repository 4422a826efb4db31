"""Search spaces of objectives."""

import inspect

import pytest

from lit_modules import objectives
from lit_modules.objectives import Objective
from lit_modules.objectives.base import Choice, Linear, Log

ABSTRACT = {"Objective", "FeatureObjective", "LogitObjective", "EmbeddingObjective", "StagesObjective"}
NEEDED = {"DML": {"peers": ["b"]}, "Sum": {"objectives": [objectives.Hinton()]}}
CLASSES = {name: found for name, found in vars(objectives).items() if inspect.isclass(found)}
METHODS = [name for name, found in CLASSES.items() if issubclass(found, Objective) and name not in ABSTRACT]


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


def test_only_methods_without_options_have_no_space() -> None:
    assert [name for name in METHODS if not getattr(objectives, name).search] == ["SimKD", "Sum"]


def test_values_are_spread_as_the_space_says() -> None:
    assert [Log(0.01, 100).at(u) for u in (0, 0.25, 0.5, 0.75, 1)] == [0.01, 0.1, 1, 10, 100]
    assert [Linear(0, 0.3).at(u) for u in (0, 0.5, 1)] == [0, 0.15, 0.3]
    assert [Choice(("a", "b", "c")).at(u) for u in (0, 0.33, 0.34, 0.99, 1)] == ["a", "a", "b", "c", "c"]
    assert "a" not in Linear(0, 1)
