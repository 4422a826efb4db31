"""What is called for a row, on noise."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.studies.attention.rows import Row

Call = Callable[[], object]


class Attention(NamedTuple):
    """The net's own, as the study is told of it.

    Attributes:
        block: makes a block of self-attention from embed_dim, num_heads, causal, dropout, bias and backend.
        kernel: makes contexts in which `scaled_dot_product_attention` of what is given takes a kernel, or refuses.
    """

    block: Callable[..., nn.Module]
    kernel: Callable[..., AbstractContextManager]


@contextmanager
def call(row: Row, attention: Attention, device: torch.device) -> Iterator[Call]:
    """What a row calls; to be called inside the block."""
    with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(row.backward):
        torch.default_generator.manual_seed(0)
        if row.block:
            yield _block(row, attention, device)
        else:
            heads, grad = _heads(row, device)
            with attention.kernel(row.backend, *heads, None, 0.0, row.causal):
                yield _kernel(row, heads, grad)


def _noise(row: Row, device: torch.device, *shape: int) -> Tensor:
    """Drawn on the CPU, in float32: the same for all."""
    return torch.randn(*shape).to(device, getattr(torch, row.dtype))


def _heads(row: Row, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values (B, heads, T, D / heads), and the gradient of what comes out."""
    shape = row.batch, row.heads, row.length, row.head_dim
    *heads, grad = (_noise(row, device, *shape) for _ in range(4))
    return [x.requires_grad_(row.backward) for x in heads], grad


def _kernel(row: Row, heads: list[Tensor], grad: Tensor) -> Call:
    query, key, value = heads
    forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=row.causal)
    if not row.backward:
        return forward
    return lambda: torch.autograd.grad(forward(), heads, grad)


def _block(row: Row, attention: Attention, device: torch.device) -> Call:
    made = attention.block(row.width, row.heads, row.causal, row.dropout, row.bias, row.backend)
    module = made.to(device, getattr(torch, row.dtype)).train(row.backward)
    x = _tokens(row, device).requires_grad_(row.backward)
    forward = torch.compile(module, dynamic=False) if row.compiled else module
    if not row.backward:
        return partial(forward, x)
    inputs, grad = [x, *module.parameters()], _noise(row, device, *_flat(x).shape)
    return lambda: torch.autograd.grad(_flat(forward(x)), inputs, grad)


def _tokens(row: Row, device: torch.device) -> Tensor:
    """(B, T, D), dense or jagged."""
    if row.lengths is None:
        return _noise(row, device, row.batch, row.length, row.width)
    values = _noise(row, device, sum(row.lengths), row.width)
    offsets = torch.tensor([0, *row.lengths], device=device).cumsum(0)
    jagged = torch.nested.nested_tensor_from_jagged(
        values, offsets, min_seqlen=min(row.lengths), max_seqlen=max(row.lengths)
    )
    return jagged.detach()


def _flat(x: Tensor) -> Tensor:
    return x.values() if x.is_nested else x
