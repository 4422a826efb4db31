"""The calls of the cases, on noise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from harness.studies.attention.cases import Case
from lit_modules.nets.attention import SelfAttention, kernel

Call = Callable[[], object]


@contextmanager
def call(case: Case, device: torch.device) -> Iterator[Call]:
    """A case's call, to be called inside the block."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(case.backward):
        torch.default_generator.manual_seed(0)
        if case.block:
            yield _block(case, device)
            return
        # Queries, keys, values, and the gradient of what comes out: (B, heads, T, D / heads)
        shape = case.batch, case.heads, case.length, case.head_dim
        *drawn, grad = (_noise(case, device, *shape) for _ in range(4))
        heads = query, key, value = [x.requires_grad_(case.backward) for x in drawn]
        with kernel(case.backend, *heads, None, 0.0, case.causal):
            forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=case.causal)
            yield (lambda: torch.autograd.grad(forward(), heads, grad)) if case.backward else forward


def _noise(case: Case, device: torch.device, *shape: int) -> Tensor:
    """Noise drawn on the CPU in float32, the same for all types and devices."""
    return torch.randn(*shape).to(device, getattr(torch, case.dtype))


def _block(case: Case, device: torch.device) -> Call:
    backend: Any = case.backend
    made = SelfAttention(case.width, case.heads, case.causal, case.dropout, case.bias, backend)
    module = made.to(device, getattr(torch, case.dtype)).train(case.backward)
    x = _tokens(case, device).requires_grad_(case.backward)
    forward = torch.compile(module, dynamic=False) if case.compiled else module
    if not case.backward:
        return partial(forward, x)
    inputs, grad = [x, *module.parameters()], _noise(case, device, *_flat(x).shape)
    return lambda: torch.autograd.grad(_flat(forward(x)), inputs, grad)


def _tokens(case: Case, device: torch.device) -> Tensor:
    """(B, T, D), dense or jagged."""
    if case.lengths is None:
        return _noise(case, device, case.batch, case.length, case.width)
    values = _noise(case, device, sum(case.lengths), case.width)
    offsets = torch.tensor([0, *case.lengths], device=device).cumsum(0)
    jagged = torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=min(case.lengths), max_seqlen=max(case.lengths)
    )
    return jagged.detach()


def _flat(x: Tensor) -> Tensor:
    return x.values() if x.is_nested else x
