"""GroupNorm, which normalises each image by itself (Wu and He 2018), in place of BatchNorm."""

from collections.abc import Callable
from typing import Literal

from torch import nn

Norm = Literal["batch", "group"]


def norm_layer(norm: Norm) -> Callable[[int], nn.Module]:
    """A function from a number of channels to their norm; ValueError if there is no norm of this name."""
    makers: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": group_norm}
    if norm not in makers:
        raise ValueError(f"norm {norm}: expected {' or '.join(makers)}")
    return makers[norm]


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with as many equal groups as possible: at most 32, the paper's number, of at least 8 channels."""
    groups = range(max(1, min(32, channels // 8)), 0, -1)
    return nn.GroupNorm(next(n for n in groups if channels % n == 0), channels)
