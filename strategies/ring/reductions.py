"""How two tensors become one: torch's reductions."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.ring.algorithms import Combine


class Reduction(NamedTuple):
    """One of torch's.

    Attributes:
        combine: changes its first tensor to the two's sum, product, ...
        averages: whether the result is divided by the number of ranks.
    """

    combine: Combine
    averages: bool = False


def _maximum(x: Tensor, y: Tensor) -> None:
    torch.maximum(x, y, out=x)


def _minimum(x: Tensor, y: Tensor) -> None:
    torch.minimum(x, y, out=x)


_OPS = {
    dist.ReduceOp.SUM: Reduction(Tensor.add_),
    dist.ReduceOp.AVG: Reduction(Tensor.add_, averages=True),
    dist.ReduceOp.PRODUCT: Reduction(Tensor.mul_),
    dist.ReduceOp.MAX: Reduction(_maximum),
    dist.ReduceOp.MIN: Reduction(_minimum),
    dist.ReduceOp.BAND: Reduction(Tensor.bitwise_and_),
    dist.ReduceOp.BOR: Reduction(Tensor.bitwise_or_),
    dist.ReduceOp.BXOR: Reduction(Tensor.bitwise_xor_),
}


def reduction(op: object) -> Reduction:
    """What an operation of torch's stands for.

    Raises:
        ValueError: it is one that only NCCL has.
    """
    for known, found in _OPS.items():
        if op == known:
            return found
    names = ", ".join(known.name for known in _OPS)
    raise ValueError(f"backend ring: expected one of the operations {names}")
