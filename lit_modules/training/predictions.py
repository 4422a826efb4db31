"""What evaluation scores: outputs of nets, of their averages and of a teacher, or values of their tokens."""

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from lit_modules.tasks.scores import TokenValues

Scored = Tensor | TokenValues  # logits, or values of tokens
T = TypeVar("T")


class Predictions(NamedTuple, Generic[T]):
    """Those of a batch."""

    teacher: T | None  # if the test has one to compare with
    students: Mapping[str, T]  # by run
    averaged: Mapping[str, T]  # by run, of the moving averages of weights
