"""Stages of a module: how layers are grouped, and checks of the groups."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput, reason
from apprentice.private import BatchNorm, tree_leaves
from strategies.base.private import ModuleMode


def apply_modules(modules: Iterable[nn.Module], x: Any, request: object = None) -> Any:
    """Apply the modules one after another; a tuple becomes several arguments. Each gets the request, if any."""
    keywords = {} if request is None else {"request": request}
    for module in modules:
        x = module(*x, **keywords) if isinstance(x, tuple) else module(x, **keywords)
    return x


def sizes_by_cost(costs: Sequence[float], rank_of: Sequence[int]) -> list[int]:
    """Return the number of modules in each stage; `rank_of` has each stage's rank. No stage is empty.

    The most expensive stage is as cheap as it can be. Where ranks have several stages, boundaries then move as long as
    a step of one or two of them makes the busiest rank less busy, or as busy with a cheaper most expensive stage.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    # best[n]: the cost of the most expensive stage if the stages so far take n modules, and where these end
    best = [(cost, [n]) for n, cost in enumerate(sums)]
    for stage in range(2, len(rank_of) + 1):
        before, best = best, []
        for n, total in enumerate(sums):
            cuts = [(max(before[i][0], total - sums[i]), [*before[i][1], n]) for i in range(stage - 1, n)]
            best.append(min(cuts, default=(float("inf"), [])))
    ends = best[-1][1]

    def load(ends: Sequence[int]) -> tuple[float, float]:
        parts = [sums[end] - sums[begin] for begin, end in itertools.pairwise([0, *ends])]
        ranks = [sum(part for part, owner in zip(parts, rank_of, strict=True) if owner == rank) for rank in {*rank_of}]
        return max(ranks), max(parts)

    while len({*rank_of}) < len(rank_of):
        lightest = min(_neighbours(ends), key=load, default=ends)
        if load(lightest) >= load(ends):
            break
        ends = lightest
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


def _neighbours(ends: Sequence[int]) -> Iterator[list[int]]:
    """Yield the ends of stages after one or two of them move by a module or two; the last end stays."""
    for first, second in itertools.combinations_with_replacement(range(len(ends) - 1), 2):
        for steps in itertools.product((-1, 0, 1), repeat=2):
            moved = [*ends]
            for place, step in zip((first, second), steps, strict=True):
                moved[place] += step
            if all(begin < end for begin, end in itertools.pairwise([0, *moved])):
                yield moved


def sizes_by_parameters(modules: Sequence[nn.Module], rank_of: Sequence[int]) -> list[int]:
    """Call `sizes_by_cost` with each module's number of parameters as its cost."""
    return sizes_by_cost([sum(p.numel() for p in module.parameters()) for module in modules], rank_of)


def group_modules(modules: Sequence[nn.Module], sizes: Sequence[int]) -> list[list[nn.Module]]:
    """Group the modules by these sizes, in order."""
    rest = iter(modules)
    return [[next(rest) for _ in range(size)] for size in sizes]


def check(module: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> None:
    """Raise BadInput for a trainable parameter in no stage, a tensor in two, or a module from elsewhere."""
    names, inner = {tensor: name for name, tensor in tensors(module)}, set(module.modules())
    expected = f"modules of {type(module).__name__} itself"
    owners: dict[Tensor, int] = {}
    for number, stage in enumerate(stages):
        for tensor in (tensor for part in stage for _, tensor in tensors(part)):
            if owners.setdefault(tensor, number) != number:
                places = f"{names.get(tensor, 'one')} is in stages {owners[tensor]} and {number}"
                raise BadInput("", "pipeline_stages", f"that a weight belongs to one stage; {places}")
            if tensor not in names:
                raise BadInput("", "pipeline_stages", f"{expected}; stage {number} has a weight from elsewhere")
        for noisy in (part.get_submodule(name) for part in stage for name in keyed.find_unkeyed_layers(part)):
            if noisy not in inner:
                raise BadInput("", "pipeline_stages", f"{expected}; a {type(noisy).__name__} is not")
    for tensor, name in names.items():
        if tensor.requires_grad and tensor not in owners:
            raise BadInput("", "pipeline_stages", f"every trainable parameter in a stage; {name} is in none")


def check_composition(module: LightningModule, stages: Sequence[Sequence[nn.Module]]) -> None:
    """Raise BadInput where the stages' output is not that of `forward`, if there is an `example_input_array`."""
    example: Any = module.example_input_array
    if example is None or isinstance(example, Mapping):
        return
    inputs = example if isinstance(example, tuple) else (example,)
    method, composed = f"{type(module).__name__}.pipeline_stages", "modules whose composition is forward"
    modes = ModuleMode()
    modes.capture(module)
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            expected = module(*_copy(inputs, module.dtype))
            first, *others = itertools.chain.from_iterable(stages)
            try:
                output = apply_modules(others, first(*_copy(inputs, module.dtype)))
            except Exception as error:
                raise BadInput("", method, f"{composed}; one refuses what it gets: {reason(error)}") from error
    finally:
        modes.restore(module)
    leaves = [[x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in (output, expected)]
    try:
        torch.testing.assert_close(*leaves, rtol=1e-3, atol=1e-3, equal_nan=True)
    except AssertionError:
        raise BadInput("", method, f"{composed}; outputs differ") from None


def _copy(inputs: tuple[Tensor, ...], dtype: Any) -> list[Tensor]:
    return [x.to(dtype, copy=True) if x.is_floating_point() else x.clone() for x in inputs]


def check_output(output: Any, layer: nn.Module, rows: int) -> None:
    """Raise BadInput where the output of a stage that ends with a layer has not the batch's rows first."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    if uneven := [tuple(x.shape) for x in tensors if not x.dim() or len(x) != rows]:
        expected = f"tensors with the batch's {rows} rows first"
        raise BadInput("", f"the stage that ends with {type(layer).__name__}", f"{expected}, got one of {uneven[0]}")


def stage_tensors(output: Any, layer: nn.Module, rows: int) -> tuple[Tensor, ...]:
    """Check and return the tensors that a stage sends to the next."""
    tensors: tuple[Any, ...] = output if type(output) is tuple else (output,)
    if wrong := [type(x).__name__ for x in tensors if not isinstance(x, Tensor)]:
        expected = "expected a tensor or a tuple of tensors for the next stage"
        raise TypeError(f"the stage that ends with {type(layer).__name__}: {expected}, got {wrong[0]}")
    check_output(tensors, layer, rows)
    return tensors


def batch_norms(module: nn.Module) -> list[str]:
    """Return the names of the BatchNorm layers, whose output for a row depends on the other rows."""
    return [name for name, layer in module.named_modules() if isinstance(layer, BatchNorm)]


def tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters and buffers with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()
