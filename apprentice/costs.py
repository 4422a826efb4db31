"""What training a net costs: floating-point operations, and the time of a step by itself."""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def parameters(net: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in net.parameters())


def flops_per_sample(step: Callable[[int], Tensor]) -> float:
    """Operations of forward, loss and backward for one sample.

    Args:
        step: runs forward for so many samples and returns the loss.
    """
    with FlopCounterMode(display=False) as counter:
        step(2).backward()
    return counter.get_total_flops() / 2


def step_ms(step: Callable[[int], Tensor], batch_size: int, times: int = 10) -> float:
    """Median milliseconds of forward, loss and backward for a batch, after one to warm up."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        step(batch_size).backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:]) * 1e3
