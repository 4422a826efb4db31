"""Tests by example whether a model is a chain of its children, and finds what it does between them."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# What models do between two children without a module for it.
GLUES: tuple[tuple[nn.Module, ...], ...] = ((), (nn.Flatten(1),), (nn.AdaptiveAvgPool2d(1), nn.Flatten(1)))


@torch.no_grad()
def chain(model: nn.Module, example: Tensor) -> list[nn.Module]:
    """The model's children in order, with modules for the pooling and flattening between them.

    Their composition equals the model's forward, bit for bit, in eval mode and for the example's inputs.

    Raises:
        ValueError: the model is not such a chain.
    """
    names, tensors = _traced(copy.deepcopy(model).eval(), example)
    if len(set(names)) < len(names):
        raise ValueError("a child is called twice")
    found = list(_between(*tensors[0]))
    for name, junction in zip(names, tensors[1:], strict=True):
        found += [model.get_submodule(name), *_between(*junction)]
    return found


def _traced(model: nn.Module, example: Tensor) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    """The children's names in call order; for each gap around them the tensor before and the tensor after it.

    Tensors are cloned, since a child may work in place.
    """
    names: list[str] = []
    given, taken = [example], []

    def enter(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise ValueError("a child takes more than one tensor")
        taken.append(args[0].clone())

    def leave(name: str, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor):
            raise ValueError("a child gives more than one tensor")
        names.append(name)
        given.append(output.clone())

    for name, child in model.named_children():
        child.register_forward_pre_hook(enter)
        child.register_forward_hook(partial(leave, name))
    taken.append(model(example.clone()))
    return names, list(zip(given, taken, strict=True))


def _between(given: Tensor, taken: Tensor) -> tuple[nn.Module, ...]:
    for glue in GLUES if given.dim() == 4 else ((),):
        if torch.equal(nn.Sequential(*glue)(given), taken):
            return glue
    raise ValueError(f"an unknown operation between {tuple(given.shape)} and {tuple(taken.shape)}")
