"""The linear layer that gives a language model's logits, and runs of the model that leave it out.

Logits (b, T, V) of a vocabulary of 49,152 take 75 times the memory of the layer's inputs of 576 values, and are needed
for the tokens alone that count in a loss: see `lit_modules.text.token_losses`.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from lit_modules.nets.base import evaluating
from lit_modules.nets.layers import observe, run, run_without_rows
from lit_modules.nets.outputs import HeadInputs, Outputs


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


def has_local_weight(net: nn.Module, head: TokenHead) -> bool:
    """Return whether this process has the layer's weight, as one tensor: neither sharded nor elsewhere."""
    weight: Any = net.get_submodule(head.path).weight
    return type(weight) is nn.Parameter and not weight.is_meta


def run_to_head(
    net: nn.Module, head: TokenHead, inputs: Tensor, names: Collection[str] = (), beside: Sequence[Tensor] = (),
    with_logits: bool = False,
) -> Outputs:  # fmt: skip
    """Run a net as `run` does; return its outputs with what its head gets, and logits only if asked for."""
    if inputs.shape[0] == 0:
        outputs = run_without_rows(lambda rows: run_to_head(net, head, rows, names, (), with_logits), inputs)
        weight, bias = head.weights(net)  # they have no rows
        return outputs._replace(hidden=outputs.hidden and outputs.hidden._replace(weight=weight, bias=bias))
    layer: Any = net.get_submodule(head.path)
    hidden = list[Tensor]()

    def keep(x: Tensor) -> Tensor:
        hidden.append(x)
        if with_logits:
            return F.linear(x, layer.weight, layer.bias)
        return x.new_zeros(1).expand(*x.shape[:-1], layer.out_features)  # takes no memory

    layer.forward = keep
    try:
        outputs = run(net, inputs, names, beside)
    finally:
        del layer.forward
    logits = outputs.logits if with_logits else outputs.logits.to("meta")  # whoever uses these fails
    return outputs._replace(logits=logits, hidden=HeadInputs(hidden[-1], *head.weights(net)))
