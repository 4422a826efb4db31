"""Activation checkpointing: backward computes a layer again instead of keeping what it computed."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, copy_context
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(layer: nn.Module) -> None:
    """Keep only the layer's inputs for backward. No parameter, name or result changes, and no noise."""
    contexts = partial(_contexts, layer)
    again = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    layer.forward = again


def _contexts(layer: nn.Module) -> tuple[AbstractContextManager, AbstractContextManager]:
    """What the layer is computed in, and in what again."""
    return nullcontext(), _as_before(layer, copy_context())


@contextmanager
def _as_before(layer: nn.Module, context: Context) -> Iterator[None]:
    """In these context variables, which key noise; a buffer, as BatchNorm's averages, does not move a second time."""
    tokens = [(variable, variable.set(value)) for variable, value in context.items()]
    buffers = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, value in buffers:
            buffer.data.copy_(value)  # `data`: autograd refuses buffers that it has saved and then sees change
        for variable, token in tokens:
            variable.reset(token)
