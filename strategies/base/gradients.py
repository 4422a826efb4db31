"""Gradients that are known before Lightning asks for them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from apprentice import replicas


@contextmanager
def set_aside(trained: Callable[[], Mapping[str, nn.Parameter]]) -> Iterator[None]:
    """Inside, the parameters that are trained have no gradients; then those again that earlier batches have left.

    Raises:
        ValueError: one has a hook, which would see the pieces of a batch; or others are trained in the end.
    """
    parameters = trained()
    if hooked := [name for name, p in parameters.items() if p._backward_hooks]:
        expected = "expected parameters without hooks, which would be called for every piece of a batch"
        raise ValueError(f"{expected}; {hooked[0]} has one")
    before = [(p, p.grad) for p in parameters.values()]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad
    after = trained()
    if changed := [name for name in {**parameters, **after} if parameters.get(name) is not after.get(name)]:
        expected = "expected a training_step that freezes, unfreezes and replaces no parameter, as a hook may"
        raise ValueError(f"{expected}; it does so with {changed[0]}")


def averaged(gradients: Mapping[nn.Parameter, Tensor | None]) -> dict[nn.Parameter, Tensor | None]:
    """Gradients averaged over the replicas; one that a replica does not have counts as zeros, if another has it."""
    if replicas.count() == 1 or not gradients:
        return dict(gradients)
    return unpacked(replicas.all_reduce_sum_(packed(gradients)), list(gradients), replicas.count())


@torch.no_grad()
def packed(gradients: Mapping[nn.Parameter, Tensor | None]) -> Tensor:
    """(elements + parameters,) all gradients in one vector to add up, then how many there are of each: 1 or 0."""
    here = next(iter(gradients)).device  # a split module has others, too
    parts = [(torch.zeros_like(p) if g is None else g).to(here) for p, g in gradients.items()]
    there = torch.tensor([float(g is not None) for g in gradients.values()])
    return torch.cat([*(part.flatten() for part in parts), there.to(parts[0])])


@torch.no_grad()
def unpacked(total: Tensor, parameters: Sequence[nn.Parameter], replicas: int = 1) -> dict[nn.Parameter, Tensor | None]:
    """The mean over replicas of what they have packed, None where none of them has a gradient.

    Args:
        total: (elements + parameters,), their sum.
        parameters: in the order in which they were packed.
        replicas: how many share the batch.
    """
    *sums, there = total.split([*(p.numel() for p in parameters), len(parameters)])
    means = [(s / replicas).view(p.shape).to(p) for p, s in zip(parameters, sums, strict=True)]
    return {p: mean if count else None for p, mean, count in zip(parameters, means, there.tolist(), strict=True)}


def handed_over(loss: Tensor, gradients: Mapping[nn.Parameter, Tensor | None]) -> Tensor:
    """A loss whose backward adds these gradients: Lightning's accumulation, clipping and hooks work on it untouched."""
    anchor = torch.zeros((), device=loss.device, requires_grad=True)  # a rank may have no parameters
    return _HandedOver.apply(loss, list(gradients.values()), anchor, *gradients)


class _HandedOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *_parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, None, *(g if g is None else g * grad for g in ctx.gradients)
