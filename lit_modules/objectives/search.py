"""Spaces in which an objective's options are searched."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Log:
    """Numbers from `low` to `high`, both above 0, evenly spread in their logarithm."""

    low: float
    high: float

    def at(self, u: float) -> float:
        """The value at a place from 0 to 1, to three digits."""
        return float(f"{math.exp(math.log(self.low) + u * math.log(self.high / self.low)):.3g}")

    def __contains__(self, value: Any) -> bool:
        return not isinstance(value, str | None) and self.low <= value <= self.high


@dataclass(frozen=True)
class Linear:
    """Numbers from `low` to `high`, evenly spread."""

    low: float
    high: float

    def at(self, u: float) -> float:
        """The value at a place from 0 to 1, to three digits."""
        return float(f"{self.low + u * (self.high - self.low):.3g}")

    def __contains__(self, value: Any) -> bool:
        return not isinstance(value, str | None) and self.low <= value <= self.high


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """The value at a place from 0 to below 1."""
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def __contains__(self, value: Any) -> bool:
        return value in self.values


Space: TypeAlias = Log | Linear | Choice


def space(**options: Space) -> Mapping[str, Space]:
    """An objective's search space: a space for each option that is searched."""
    return MappingProxyType(options)
