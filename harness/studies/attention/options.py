"""The study's own options."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from apprentice.errors import BadInput
from harness import config

DTYPES = ("float32", "float16", "bfloat16")
QUICK = {
    "lengths": [16, 32], "block_lengths": [32], "tokens": 64, "heads": 2, "head_dim": 8, "dtypes": ["float32"],
    "parts": ["kernels", "blocks", "profile"], "seconds": 0.001,
}  # fmt: skip


@dataclass
class Options(config.OneSeedOptions):
    """Options of the study; sizes that are not given fit the device.

    Args:
        exact: none; nothing is trained.
        device: auto takes a GPU where there is one.
        parts: measure just these of kernels, blocks, tutorial, profile.
        backends: just these kernels, as in --backends math flash; all when not given.
        dtypes: of float32, float16 and bfloat16.
        lengths: tokens of a text, for the kernels.
        block_lengths: tokens of a text, for the block, eager and compiled.
        tokens: of a batch, as near as texts of a length come to it.
        heads: of the attention.
        head_dim: width of a head.
        seconds: for which a row is timed at least.
        longest: seconds; a block whose products of matrices take longer than that is left out.
        quick: take small sizes wherever none are given, to see what comes out.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    parts: list[str] | None = None
    backends: list[str] | None = None
    dtypes: list[str] = field(default_factory=lambda: list(DTYPES))
    lengths: list[int] | None = None
    block_lengths: list[int] | None = None
    tokens: int | None = None
    heads: int = 8
    head_dim: int = 64
    seconds: float = 0.2
    longest: float = 1.0
    quick: bool = False
    quick_values: ClassVar[Mapping[str, Any]] = QUICK
    why_inexact: ClassVar[str] = "nothing is trained"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokens", "heads", "head_dim"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise BadInput(name, value, "at least 1")
        for name in ("seconds", "longest"):
            if not getattr(self, name) > 0:
                raise BadInput(name, getattr(self, name), "seconds, above 0")
        for name in ("lengths", "block_lengths"):
            sizes = getattr(self, name)
            if sizes is not None and (not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 2):
                raise BadInput(name, sizes, "numbers of tokens, at least 2, none of them twice")
