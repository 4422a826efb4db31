"""How long the layers of a module take, to deal them to stages."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from strategies.staging.stages import chained

REPEATS = 3


def seconds(modules: Sequence[nn.Module], inputs: tuple[Tensor, ...]) -> list[float]:
    """Seconds that each module takes for forward and backward, the least of a few; they are left as they were.

    Args:
        modules: in order; each takes what the one before gives.
        inputs: of the first.
    """
    found = []
    for module in modules:
        with _untouched(module):
            runs = [_timed(module, inputs) for _ in range(REPEATS)]
        inputs = runs[0][0]
        found.append(min(time for _, time in runs))
    return found


def _timed(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], float]:
    device = inputs[0].device
    # A clone of a leaf, as layers may work in place.
    inputs = tuple(x.detach().requires_grad_(x.is_floating_point()).clone() for x in inputs)
    _wait(device)
    start = time.perf_counter()
    given = chained([module], inputs if len(inputs) > 1 else inputs[0])
    outputs = given if isinstance(given, tuple) else (given,)
    wanted = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(y) for y in wanted])
    _wait(device)
    return outputs, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with torch.random.fork_rng([d for d in {p.device for p in module.parameters()} if d.type == "cuda"]):
        yield
    for buffer, value in buffers:
        buffer.data.copy_(value)
    for p in module.parameters():
        p.grad = None
