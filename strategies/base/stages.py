"""A module cut into stages: which layers belong together."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from apprentice import keyed


def chained(modules: Iterable[nn.Module], x: Any) -> Any:
    """The modules one after another; a tuple is taken as several arguments."""
    for module in modules:
        x = module(*x) if isinstance(x, tuple) else module(x)
    return x


def sizes_by_cost(costs: Sequence[float], stages: int) -> list[int]:
    """How many modules each stage takes, so that the dearest stage costs the least that can be; none is empty."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # dearest[n]: the least that the dearest of the stages so far costs if they take n modules, and what the last takes
    dearest = [(cost, [n]) for n, cost in enumerate(sums)]
    for stage in range(2, stages + 1):
        dearest = [
            min(
                (
                    (max(dearest[first][0], sums[n] - sums[first]), [*dearest[first][1], n - first])
                    for first in range(stage - 1, n)
                ),
                default=(float("inf"), []),
            )
            for n in range(len(sums))
        ]
    return dearest[-1][1]


def grouped(modules: Sequence[nn.Module], sizes: Sequence[int]) -> list[list[nn.Module]]:
    """The modules in groups of these sizes, in their order."""
    rest = iter(modules)
    return [[next(rest) for _ in range(size)] for size in sizes]


def check(module: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> None:
    """Raise ValueError where a tensor is in no stage although it trains, or in two; the message names it."""
    names = {tensor: name for name, tensor in tensors(module)}
    owners: dict[Tensor, int] = {}
    for number, stage in enumerate(stages):
        for tensor in dict.fromkeys(tensor for part in stage for _, tensor in tensors(part)):
            if owners.setdefault(tensor, number) != number:
                expected = "a weight belongs to one stage"
                found = f"{names.get(tensor, 'one')} is in stages {owners[tensor]} and {number}"
                raise ValueError(f"pipeline_stages: expected that {expected}; {found}")
    for tensor, number in owners.items():
        if tensor not in names:
            expected = f"expected modules of {type(module).__name__} itself"
            raise ValueError(f"pipeline_stages: {expected}; stage {number} has a weight from elsewhere")
    own = set(module.modules())
    for part in itertools.chain.from_iterable(stages):
        if strange := [name for name in keyed.unkeyed(part) if part.get_submodule(name) not in own]:
            kind = type(part.get_submodule(strange[0])).__name__
            raise ValueError(f"pipeline_stages: expected modules of {type(module).__name__} itself; a {kind} is not")
    for tensor, name in names.items():
        if tensor.requires_grad and tensor not in owners:
            raise ValueError(f"pipeline_stages: expected every trainable parameter in a stage; {name} is in none")


def check_composition(module: LightningModule, stages: Sequence[Sequence[nn.Module]]) -> None:
    """Raise ValueError where the stages give something else than `forward`, if there is an `example_input_array`."""
    example: Any = module.example_input_array
    if example is None or isinstance(example, Mapping):
        return
    inputs = example if isinstance(example, tuple) else (example,)
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            expected = module(*_copied(inputs, module.dtype))
            first, *others = itertools.chain.from_iterable(stages)
            found = chained(others, first(*_copied(inputs, module.dtype)))
    finally:
        for part, mode in modes.items():
            part.training = mode
    pairs = itertools.zip_longest(tree_leaves(found), tree_leaves(expected))
    if not all(_alike(a, b) for a, b in pairs if isinstance(a, Tensor) or isinstance(b, Tensor)):
        name = type(module).__name__
        raise ValueError(f"{name}.pipeline_stages: expected modules whose composition is forward; outputs differ")


def _copied(inputs: tuple[Tensor, ...], dtype: Any) -> list[Tensor]:
    return [x.to(dtype, copy=True) if x.is_floating_point() else x.clone() for x in inputs]


def _alike(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return torch.allclose(a, b, rtol=1e-3, atol=1e-3, equal_nan=True)


def normalised(module: nn.Module) -> list[str]:
    """Names of the layers in which the rows that are computed together see one another."""
    return [name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters and buffers with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()
