"""From a graph whose ranges are known to the int8 net."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from lit_modules.quantization.capture import ATEN, draws
from lit_modules.quantization.prepare import with_modes


def folded(graph: GraphModule) -> GraphModule:
    """A trained graph for inference: without dropout, and with each BatchNorm folded into the convolution before it.

    Source: Krishnamoorthi 2018, "Quantizing deep convolutional networks for efficient inference", section 3.2.2, which
    training simulates. torchao does the same by matching patterns, which takes it half a minute.
    """
    for node in list(graph.graph.nodes):
        if draws(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)  # torch does not count random operations as dead code
        elif node.target is ATEN.batch_norm.default:
            _fold(graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _fold(graph: GraphModule, norm: Node) -> None:
    """Fold a BatchNorm into its convolution, if there is one that was scaled for it."""
    arguments: Any = norm.args
    x, eps = arguments[0], arguments[7]
    conv_bias = None
    if x.target is ATEN.add.Tensor and getattr(x.args[1], "target", None) is ATEN.reshape.default:
        x, conv_bias = x.args[0], x.args[1].args[0]
    if x.target is not ATEN.div.Tensor or x.args[0].target is not ATEN.conv2d.default:
        return
    conv = x.args[0]
    fake = conv.args[1]
    (scaled,) = fake.args
    if scaled.target is not ATEN.mul.Tensor:
        return  # the net's own division
    with torch.no_grad():
        gamma, beta, mean, variance = (_tensor(graph, node) for node in arguments[1:5])
        factor = gamma / (variance + eps).sqrt()
        weight = _tensor(graph, scaled.args[0])
        bias = 0 if conv_bias is None else _tensor(graph, conv_bias)
        weight = weight * factor.reshape(-1, *[1] * (weight.dim() - 1))
        bias = beta + (bias - mean) * factor
    for name, value in ((f"{conv.name}_weight", weight), (f"{conv.name}_bias", bias)):
        graph.register_parameter(name, nn.Parameter(value))
    with graph.graph.inserting_before(fake):
        fake.args = (graph.graph.get_attr(f"{conv.name}_weight"),)
    with graph.graph.inserting_before(conv):
        conv.update_arg(2, graph.graph.get_attr(f"{conv.name}_bias"))
    norm.replace_all_uses_with(conv)
    graph.graph.erase_node(norm)


def observe_weights(graph: GraphModule) -> None:
    """Observe the current weights of a folded graph; training has the ranges of the step before."""
    for node in graph.graph.nodes:
        quantiser: Any = graph.get_submodule(node.target) if node.op == "call_module" else None
        if getattr(quantiser, "is_per_channel", False) and quantiser.observer_enabled:
            quantiser.activation_post_process.train()(_tensor(graph, node.args[0]))


def _tensor(graph: GraphModule, node: Node) -> Tensor:
    owner, _, name = str(node.target).rpartition(".")
    return getattr(graph.get_submodule(owner), name)


def converted(graph: GraphModule) -> nn.Module:
    """The int8 net of a graph whose ranges are known: inputs (b, ...) -> logits (b, classes); in place."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    for node in graph.graph.nodes:
        if node.target is ATEN.batch_norm.default:  # torchao would search its convolution for half a minute
            x, weight, bias, mean, variance, _, momentum, eps, _ = node.args
            node.target, node.args = F.batch_norm, (x, mean, variance, weight, bias, False, momentum, eps)
    graph = with_modes(convert_pt2e(graph))
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    output.args = (output.args[0][0],)
    graph.graph.eliminate_dead_code()
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for path in [*dict(graph.named_parameters()), *dict(graph.named_buffers())]:
        if path not in used:  # the floats of int8 weights
            owner, _, name = path.rpartition(".")
            delattr(graph.get_submodule(owner), name)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph.requires_grad_(False).eval()
