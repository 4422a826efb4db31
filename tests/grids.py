"""Grids of which the quick set runs a part."""

from collections.abc import Hashable, Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Hashable], *quick: Hashable) -> list[Any]:
    """The values for `pytest.mark.parametrize`, of which all but the quick ones are left to `tests/run.sh --all`.

    Tuples are the values of several arguments.
    """
    values = list(values)
    assert set(quick) <= set(values)
    rows = {value: value if isinstance(value, tuple) else (value,) for value in values}
    return [value if value in quick else pytest.param(*rows[value], marks=pytest.mark.slow) for value in values]
