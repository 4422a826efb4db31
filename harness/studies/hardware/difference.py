"""How far two sets of weights are apart."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def largest_difference(weights: Weights, others: Weights) -> float:
    """The largest absolute difference between two numbers; NaN if any is.

    Raises:
        ValueError: they are not of one net.
    """
    _check(weights, others)
    apart = [(weights[name].double() - others[name].double()).abs() for name in weights if weights[name].numel()]
    return torch.stack([x.max() for x in apart]).max().item()


def differing_bits(weights: Weights, others: Weights) -> int:
    """The number of bits in which they differ.

    Raises:
        ValueError: they are not of one net, or of different types.
    """
    _check(weights, others)
    return sum(int(np.bitwise_count(_bytes(weights[name]) ^ _bytes(others[name])).sum()) for name in weights)


def _bytes(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).numpy().view(np.uint8)


def _check(weights: Weights, others: Weights) -> None:
    kinds = [{name: x.shape for name, x in each.items()} for each in (weights, others)]
    if kinds[0] != kinds[1]:
        raise ValueError("expected the weights of one net twice")
