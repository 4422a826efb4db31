"""What training a net costs: floating-point operations, and the time of a step by itself."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
FLASH_ON_CPU: dict[Any, Any] = {  # which torch 2.11's counter does not know; by the shapes of query, key and value
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def parameters(net: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in net.parameters())


def flops(step: Callable[[], Tensor]) -> int:
    """Operations of a step: forward and loss, which it returns, and backward; nothing is compiled to count them."""
    counter = FlopCounterMode(display=False, custom_mapping=FLASH_ON_CPU)
    with torch.compiler.set_stance("force_eager"), counter:
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
