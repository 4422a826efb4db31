"""torch's reductions of two tensors to one."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.ring.algorithms import Combine


class Reduction(NamedTuple):
    """One of torch's; one that averages divides the result by the number of ranks."""

    combine: Combine
    averages: bool = False


_OPS = {
    dist.ReduceOp.SUM: Reduction(Tensor.add_),
    dist.ReduceOp.AVG: Reduction(Tensor.add_, averages=True),
    dist.ReduceOp.PRODUCT: Reduction(Tensor.mul_),
    dist.ReduceOp.MAX: Reduction(lambda x, y: torch.maximum(x, y, out=x)),
    dist.ReduceOp.MIN: Reduction(lambda x, y: torch.minimum(x, y, out=x)),
    dist.ReduceOp.BAND: Reduction(Tensor.bitwise_and_),
    dist.ReduceOp.BOR: Reduction(Tensor.bitwise_or_),
    dist.ReduceOp.BXOR: Reduction(Tensor.bitwise_xor_),
}


def reduction(op: object, x: Tensor) -> Reduction:
    """The reduction for an operation of torch's; ValueError if only NCCL has it, or it can't be for the type of `x`."""
    for known, found in _OPS.items():
        if op == known:
            _check(known.name, found, x.dtype)
            return found
    names = ", ".join(known.name for known in _OPS)
    raise ValueError(f"backend ring: expected one of the operations {names}")


def _check(name: str, found: Reduction, dtype: torch.dtype) -> None:
    """Fail before any message is sent, which the next collective would receive."""
    try:
        if found.averages and not (dtype.is_floating_point or dtype.is_complex):
            raise RuntimeError("integers have no mean of their type")
        found.combine(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype))
    except RuntimeError as error:  # NotImplementedError is one
        raise ValueError(f"backend ring: expected another operation than {name} for {dtype}: {error}") from None
