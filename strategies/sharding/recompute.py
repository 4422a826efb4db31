"""Activation checkpointing: backward recomputes a layer instead of storing its activations."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, copy_context
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(layer: nn.Module) -> None:
    """Store only the layer's inputs for backward; parameters, names, results and noise stay the same."""

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:  # of forward and of the recomputation
        return nullcontext(), _same_conditions(layer, copy_context())

    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


@contextmanager
def _same_conditions(layer: nn.Module, context: Context) -> Iterator[None]:
    """Restore the context variables, which key noise, and keep buffers, such as BatchNorm's, from a second update."""
    tokens = [(variable, variable.set(value)) for variable, value in context.items()]
    buffers = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    try:
        yield
    finally:
        for buffer, value in buffers:
            buffer.data.copy_(value)  # `data`: autograd refuses changes of buffers that it has saved
        for variable, token in tokens:
            variable.reset(token)
