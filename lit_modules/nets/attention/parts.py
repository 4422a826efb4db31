"""Attention of two parts, of which one can be switched off, to find out what the other does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

Part = Literal["both", "window", "linear"]


class InParts:
    """A mixer with a window and a linear part; `part` says what counts."""

    part: Part = "both"


def has_parts(net: nn.Module) -> bool:
    """Return whether some mixer of a net has two parts."""
    return any(isinstance(module, InParts) for module in net.modules())


@contextmanager
def with_part(net: nn.Module, part: Part) -> Iterator[None]:
    """Inside, this part of each mixer `InParts` of a net counts."""
    mixers = [module for module in net.modules() if isinstance(module, InParts)]
    before = [mixer.part for mixer in mixers]
    for mixer in mixers:
        mixer.part = part
    try:
        yield
    finally:
        for mixer, former in zip(mixers, before, strict=True):
            mixer.part = former
