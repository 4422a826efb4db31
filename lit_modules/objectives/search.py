"""Spaces in which options of objectives are searched."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Linear:
    """A space in which an option is searched: numbers from `low` to `high`, uniform."""

    low: float
    high: float

    def at(self, u: float) -> float:
        """Return the value at a place u from 0 to 1, to three digits."""
        return float(f"{self.low + u * (self.high - self.low):.3g}")

    def __contains__(self, value: Any) -> bool:
        return not isinstance(value, str | None) and self.low <= value <= self.high


class Log(Linear):
    """Numbers from `low` to `high`, both above 0, uniform in the logarithm."""

    def at(self, u: float) -> float:
        return float(f"{math.exp(math.log(self.low) + u * math.log(self.high / self.low)):.3g}")


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]

    def at(self, u: float) -> Any:
        """Return the value at a place u from 0 to below 1."""
        return self.values[min(int(u * len(self.values)), len(self.values) - 1)]

    def __contains__(self, value: Any) -> bool:
        return value in self.values


Space: TypeAlias = Linear | Choice


def space(**options: Space) -> Mapping[str, Space]:
    """Return an objective's search space: a space for each option to search."""
    return MappingProxyType(options)
