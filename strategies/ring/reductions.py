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


def _try(name: str, found: Reduction, dtype: torch.dtype) -> None:
    """Refuse now: later messages would be under way, and the next collective would take them for its own."""
    whole = not (dtype.is_floating_point or dtype.is_complex)
    try:
        if found.averages and whole:
            raise RuntimeError("whole numbers have no mean among them")
        found.combine(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype))
    except RuntimeError as error:  # NotImplementedError is one
        raise ValueError(f"backend ring: expected another operation than {name} for {dtype}: {error}") from None


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


def reduction(op: object, x: Tensor) -> Reduction:
    """What an operation of torch's stands for, for tensors like `x`.

    Raises:
        ValueError: it is one that only NCCL has, or has no meaning for such numbers.
    """
    for known, found in _OPS.items():
        if op == known:
            _try(known.name, found, x.dtype)
            return found
    names = ", ".join(known.name for known in _OPS)
    raise ValueError(f"backend ring: expected one of the operations {names}")
