"""Gradients that are known before Lightning asks for them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from apprentice import replicas


@contextmanager
def set_aside(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Inside, parameters have no gradients; then those again that batches before this one have left.

    Raises:
        ValueError: one has a hook, which would see the pieces of a batch.
    """
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


@torch.no_grad()
def averaged(gradients: Mapping[nn.Parameter, Tensor | None]) -> dict[nn.Parameter, Tensor | None]:
    """Gradients averaged over the replicas; one that a replica does not have counts as zeros, if another has it."""
    if replicas.count() == 1 or not gradients:
        return dict(gradients)
    found: dict[nn.Parameter, Tensor | None] = {}
    for dtype in dict.fromkeys(p.dtype for p in gradients):
        chosen = {p: g for p, g in gradients.items() if p.dtype == dtype}
        parts = [torch.zeros_like(p) if g is None else g for p, g in chosen.items()]
        there = torch.stack([torch.tensor(float(g is not None)) for g in chosen.values()])
        flat = torch.cat([*(part.flatten() for part in parts), there.to(parts[0])])
        replicas.add_up(flat)
        *sums, there = flat.split([*(part.numel() for part in parts), len(parts)])
        for p, total, count in zip(chosen, sums, there.tolist(), strict=True):
            found[p] = (total / replicas.count()).view(p.shape) if count else None
    return {p: found[p] for p in gradients}


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
