"""Measures how long the layers of a module take, to balance stages."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.base.stages import chained
from strategies.pipeline.states import unchanged

REPEATS = 3


def seconds(modules: Sequence[nn.Module], inputs: tuple[Tensor, ...]) -> list[float]:
    """Seconds of each module's forward and backward in a chain, the minimum of a few runs; modules stay unchanged."""
    found = []
    device = inputs[0].device
    x: Any = inputs if len(inputs) > 1 else inputs[0]
    for module in modules:
        with unchanged([module], device):
            runs = [_timed(module, x, device) for _ in range(REPEATS)]
        module.zero_grad()
        x = runs[0][0]
        found.append(min(time for _, time in runs))
    return found


def _timed(module: nn.Module, x: Any, device: torch.device) -> tuple[Any, float]:
    # Clones of leaves, as layers may work in place.
    x = tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()).clone(), x)
    _synchronize(device)
    start = time.perf_counter()
    y = chained([module], x)
    outputs = [leaf for leaf in tree_leaves(y) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(leaf) for leaf in outputs])
    _synchronize(device)
    return y, time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
