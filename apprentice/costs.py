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


def flops(step: Callable[[], Tensor]) -> int:
    """Operations of a step: forward and loss, which it returns, and backward; nothing is compiled to count them."""
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        step().backward()
    return counter.get_total_flops()


def milliseconds(step: Callable[[], Tensor], times: int = 10) -> float:
    """Median time of a step, backward included, after one to warm up."""
    seconds = []
    for _ in range(times + 1):
        start = time.perf_counter()
        loss = step()
        loss.backward()
        if loss.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:]) * 1e3
