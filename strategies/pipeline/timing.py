"""How long the layers of a module take, to deal them to stages."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from strategies.base.stages import chained

REPEATS = 3


def seconds(modules: Sequence[nn.Module], inputs: tuple[Tensor, ...]) -> list[float]:
    """Seconds that each module takes for forward and backward, the least of a few; they are left as they were.

    Args:
        modules: in order; each takes what the one before gives.
        inputs: of the first.
    """
    found = []
    x: Any = inputs if len(inputs) > 1 else inputs[0]
    for module in modules:
        with _untouched(module):
            runs = [_timed(module, x) for _ in range(REPEATS)]
        x = runs[0][0]
        found.append(min(time for _, time in runs))
    return found


def _timed(module: nn.Module, x: Any) -> tuple[Any, float]:
    device = next(leaf.device for leaf in tree_leaves(x) if isinstance(leaf, Tensor))
    x = tree_map(_received, x)
    _wait(device)
    start = time.perf_counter()
    y = chained([module], x)
    wanted = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(leaf) for leaf in wanted])
    _wait(device)
    return y, time.perf_counter() - start


def _received(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    # A clone of a leaf, as layers may work in place.
    return leaf.detach().requires_grad_(leaf.is_floating_point()).clone()


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
