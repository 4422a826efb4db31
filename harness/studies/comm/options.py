"""The study's own options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from apprentice.errors import BadInput
from harness import config

QUICK = {"sizes": [2**10, 2**16], "repeats": 2}
LARGEST = 2**32  # bytes: a rank has a few buffers of each size


@dataclass
class Options(config.OneSeedOptions):
    """Options of the study.

    Args:
        exact: none; what is sent is checked to the bit in any case.
        sizes: bytes of the largest buffer, as nccl-tests count them.
        repeats: blocks of calls that are timed; told is their median.
        only: measure just these operations, as in --only broadcast all_reduce_sum.
        backends: just these, as in --backends gloo ring; all that fit the devices when not given.
        timeout: seconds a rank may keep the others waiting.
        quick: take two small sizes and fewer repeats, wherever none are given.
    """

    sizes: list[int] = field(default_factory=lambda: [2**power for power in range(10, 27, 2)])
    repeats: int = 7
    only: list[str] | None = None
    backends: list[str] | None = None
    timeout: float = 120.0
    quick: bool = False
    quick_values: ClassVar[Mapping[str, Any]] = QUICK
    why_inexact: ClassVar[str] = "what is sent is checked to the bit in any case"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repeats < 1:
            raise BadInput("repeats", self.repeats, "at least 1")
        if not self.timeout > 0:
            raise BadInput("timeout", self.timeout, "seconds, above 0")
        sizes = self.sizes
        if not sizes or len(set(sizes)) < len(sizes) or not all(1 <= size <= LARGEST for size in sizes):
            raise BadInput("sizes", sizes, f"bytes, from 1 to {LARGEST}, none of them twice")
