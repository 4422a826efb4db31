"""Gradients and parameters in flat vectors, which one collective carries; and gradients that Lightning takes over."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from apprentice import replicas
from apprentice.errors import BadInput

# Parts of what autograd says where other ranks have computed a net's output.
NO_GRADIENT = re.compile("does not require grad|not have been used in the graph")
NORM = "trainer.strategy.gradient_norm(parameters) in place of grad_norm"


def parameters_of(*optimizers: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that the optimizers step, in their order."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """(elements,) all tensors, one after another, on the first one's device."""
    return torch.cat([x.detach().flatten().to(tensors[0].device) for x in tensors])


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a vector with these tensors' shapes."""
    pieces = vector.split([x.numel() for x in like])
    return [piece.view(x.shape) for piece, x in zip(pieces, like, strict=True)]


@torch.no_grad()
def copy_from(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Set tensors to the values that `flatten` has put into a vector."""
    for x, values in zip(tensors, unflatten(vector, tensors), strict=True):
        x.copy_(values)


@torch.no_grad()
def pack(gradients: Mapping[nn.Parameter, Tensor | None]) -> Tensor:
    """(elements + parameters,) all gradients, zeros for None; then 1 for each that is a tensor, 0 for None."""
    present = torch.tensor([float(g is not None) for g in gradients.values()])
    parts = [torch.zeros_like(p) if g is None else g for p, g in gradients.items()]
    return flatten([*parts, present.to(parts[0])])


@torch.no_grad()
def unpack(vector: Tensor, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor | None]:
    """Return the gradients in a packed vector, or in a sum of several: None where no rank had one."""
    *gradients, present = unflatten(vector, [*parameters, vector[: len(parameters)]])
    pairs = zip(parameters, gradients, present.tolist(), strict=True)
    return {p: gradient.to(p) if count else None for p, gradient, count in pairs}


def average(gradients: Mapping[nn.Parameter, Tensor | None]) -> dict[nn.Parameter, Tensor | None]:
    """Average gradients over the replicas; None counts as zeros where another replica has a gradient."""
    if replicas.count() == 1 or not gradients:
        return dict(gradients)
    return unpack(replicas.all_reduce_sum_(pack(gradients)) / replicas.count(), list(gradients))


def gather(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """(ranks, *x.shape): `x` of every rank of a group; the gradient of each is the sum over the ranks."""
    return cast("Tensor", _Gather.apply(x, group))


class _Gather(torch.autograd.Function):
    """Replaces torch's, whose backward takes a group's ranks for those of the world."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


@contextmanager
def set_aside(trainable: Callable[[], Mapping[str, nn.Parameter]]) -> Iterator[None]:
    """Clear the trainable parameters' gradients inside; restore those of earlier batches afterwards.

    BadInput: a parameter has a hook, or other parameters are trained at the end.
    """
    parameters = trainable()
    if hooked := [name for name, p in parameters.items() if p._backward_hooks]:
        expected = "parameters without hooks, which would be called for every piece of a batch"
        raise BadInput("", "training_step", f"{expected}; {hooked[0]} has one")
    before = [(p, p.grad) for p in parameters.values()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad
    after = trainable()
    if changed := [name for name in {**parameters, **after} if parameters.get(name) is not after.get(name)]:
        expected = "a training_step that freezes, unfreezes and replaces no parameter, as a hook may"
        raise BadInput("", "training_step", f"{expected}; it does so with {changed[0]}")


def attach_gradients(loss: Tensor, gradients: Mapping[nn.Parameter, Tensor | None]) -> Tensor:
    """Return a loss whose backward adds these gradients, so that Lightning's accumulation, clipping and hooks work."""
    anchor = torch.zeros((), device=loss.device, requires_grad=True)  # a rank may have no parameters
    return cast("Tensor", _AttachedGradients.apply(loss, list(gradients.values()), anchor, *gradients))


class _AttachedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *_parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, *(g if g is None else g * grad for g in ctx.gradients)
