"""The linear layer that gives a language model's logits, and runs of the model that leave it out.

Logits (b, T, V) of a vocabulary of 49,152 take 75 times the memory of the layer's inputs of 576 values, and are needed
for the tokens alone that count in a loss: see `lit_modules.token_losses`.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.nets.base import Outputs, evaluating
from lit_modules.nets.layers import observe, run, run_without_rows

HIDDEN = "head<<"  # the feature that holds the head's inputs (b, T, H); no path ends in two signs


class TokenHead(NamedTuple):
    """Where a net's logits come from."""

    path: str  # of the linear layer
    size: int  # V, its first outputs, which are the logits

    def weights(self, net: nn.Module) -> tuple[Tensor, Tensor | None]:
        """Return weight (V, H) and bias (V,) of the layer, of a net or of a copy of it."""
        layer: Any = net.get_submodule(self.path)
        weight, bias = layer.weight, layer.bias
        if len(weight) == self.size:
            return weight, bias
        return weight[: self.size], None if bias is None else bias[: self.size]


def find_token_head(net: nn.Module, tokens: Tensor) -> TokenHead | None:
    """Run a net on tokens (b, T); return the linear layer whose output, or the first part of it, is its logits.

    None if there is no such layer, as in models that scale or cap their logits.
    """
    layers = {path: layer for path, layer in net.named_modules() if path and type(layer) is nn.Linear}
    with evaluating(net), observe(layers) as outputs:
        logits = net(tokens)
    for path, output in reversed(outputs.items()):
        same_start = logits.data_ptr() == output.data_ptr() and logits.stride() == output.stride()
        if same_start and logits.dim() == 3 and logits.shape[:-1] == output.shape[:-1]:
            return TokenHead(path, logits.shape[-1])
    return None


def is_whole(net: nn.Module, head: TokenHead) -> bool:
    """Return whether this process has the layer's weight, as one tensor: neither sharded nor elsewhere."""
    weight: Any = net.get_submodule(head.path).weight
    return type(weight) is nn.Parameter and not weight.is_meta


def run_before_head(
    net: nn.Module, head: TokenHead, inputs: Tensor, names: Collection[str] = (), with_logits: bool = False
) -> Outputs:
    """Run a net as `run` does; its outputs have the head's inputs as the feature HIDDEN.

    Unless `with_logits` the head is not computed, and the logits (b, T, V) are NaN and take no memory.
    """
    if inputs.shape[0] == 0:
        return run_without_rows(lambda rows: run_before_head(net, head, rows, names, with_logits), inputs)
    layer: Any = net.get_submodule(head.path)
    hidden = list[Tensor]()

    def keep(x: Tensor) -> Tensor:
        hidden.append(x)
        if with_logits:
            return F.linear(x, layer.weight, layer.bias)
        return x.new_full((1,), torch.nan).expand(*x.shape[:-1], layer.out_features)

    layer.forward = keep
    try:
        outputs = run(net, inputs, names)
    finally:
        del layer.forward
    return outputs.with_features({HIDDEN: hidden[-1]})


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits (n, V) of the head's inputs (n, H), in the type of autocast if that is on."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return F.linear(hidden, weight, bias)
