"""Graphs with observers or fake quantisers from torchao's PT2E, and their conversion to int8."""

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from apprentice import extras
from apprentice.errors import BadInput
from deploy.int8.capture import ATEN, NET, capture, draws_noise, path_of
from deploy.int8.ranges import Range

EXTRA = ("quant", "torchao")
PT2E = [f"torchao.quantization.pt2e.{name}" for name in ("quantize_pt2e", "quantizer.x86_inductor_quantizer")]


def quantizer(training: bool) -> Any:
    """Return PT2E's quantiser for x86: activations uint8 per tensor, weights int8 per channel."""
    extras.need(*EXTRA, *PT2E)
    from torchao.quantization.pt2e import FakeQuantize
    from torchao.quantization.pt2e.quantizer import QuantizationSpec
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    if not training:
        return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    moving = FakeQuantize.with_args(observer=Range)
    latest = FakeQuantize.with_args(observer=partial(Range, averaging_constant=1.0))
    activation = QuantizationSpec(torch.uint8, moving, 0, 255, torch.per_tensor_affine)
    weight = QuantizationSpec(torch.int8, latest, -128, 127, torch.per_channel_symmetric, ch_axis=0)
    config = x86.QuantizationConfig(activation, activation, weight, None, True)
    return x86.X86InductorQuantizer().set_global(config)


def prepare_graph(net: nn.Module, example: Tensor, layers: Sequence[str] = (), training: bool = False) -> GraphModule:
    """Return a copy of a trained net with observers, which learn ranges, or to train, with fake quantisers."""
    spec = quantizer(training)
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e, prepare_qat_pt2e

    graph: GraphModule = (prepare_qat_pt2e if training else prepare_pt2e)(
        capture(net.train(training), example, layers), spec
    )
    if not any(name.startswith("activation_post_process") for name, _ in graph.named_children()):
        expected = "a net with layers that torchao quantises, such as nn.Conv2d and nn.Linear"
        raise BadInput("net", type(net).__name__, expected)
    return graph


def prepare_trainable_graph(net: nn.Module, example: Tensor, layers: Sequence[str] = ()) -> GraphModule:
    """Return the net in training mode with fake quantisers, which round floats as int8 will."""
    graph = restore_modes(prepare_graph(net, example, layers, training=True))
    for node in list(graph.graph.nodes):
        if node.target is ATEN.add_.Tensor and str(node.args[0].target).endswith("num_batches_tracked"):
            graph.graph.erase_node(node)  # the modules count
        if node.target is ATEN.batch_norm.default:
            eps = net.get_submodule(_norm_path(node)).eps
            for user in list(node.args[4].users):
                user.update_arg(7 if user is node else 1, eps)  # torchao 0.18 writes 1e-5 for any
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def restore_modes(graph: GraphModule) -> GraphModule:
    """Restore `train` and `eval`, which PT2E replaces; return the graph."""
    for name in ("train", "eval"):
        vars(graph).pop(name, None)
    return graph


def restore_modules(graph: GraphModule, net: nn.Module) -> GraphModule:
    """Replace the graph's BatchNorm and dropout by the net's layers, with the same names of parameters and buffers."""
    for node in list(graph.graph.nodes):
        norm = node.target is ATEN.batch_norm.default
        if not norm and not draws_noise(node):
            continue
        net_path = _norm_path(node) if norm else path_of(node)
        path = f"{NET}.{net_path}"
        module: Any = net.get_submodule(net_path)
        if getattr(module, "inplace", False):
            module.inplace = False  # other nodes of the graph may use its input
        tensors = graph.get_submodule(path) if norm else nn.Module()
        for name, value in [*tensors.named_parameters(recurse=False), *tensors.named_buffers(recurse=False)]:
            setattr(module, name, value)
        graph.add_submodule(path, module)
        with graph.graph.inserting_after(node):
            new = graph.graph.call_module(path, (node.args[0],))
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _norm_path(norm: Node) -> str:
    mean: Any = norm.args[3]
    return str(mean.target).rpartition(".")[0].removeprefix(f"{NET}.")


def fold_batch_norms(graph: GraphModule) -> GraphModule:
    """Remove dropout from a trained graph, and fold each BatchNorm into the convolution before it; return the graph.

    Training simulates this (Krishnamoorthi 2018, "Quantizing deep convolutional networks for efficient inference",
    section 3.2.2). torchao does the same by matching patterns, which takes half a minute.
    """
    for node in list(graph.graph.nodes):
        if draws_noise(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)  # torch does not count random operations as dead code
        elif node.target is ATEN.batch_norm.default:
            _fold(graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _fold(graph: GraphModule, norm: Node) -> None:
    """Fold a BatchNorm into its convolution, if there is one that torchao scaled for it."""
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
        return  # a division of the net
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
    """Observe the current weights of a folded graph; training left the ranges of the step before."""
    for node in graph.graph.nodes:
        quantiser: Any = graph.get_submodule(node.target) if node.op == "call_module" else None
        if getattr(quantiser, "is_per_channel", False) and quantiser.observer_enabled:
            quantiser.activation_post_process.train()(_tensor(graph, node.args[0]))


def _tensor(graph: GraphModule, node: Node) -> Tensor:
    tensor: Tensor = attrgetter(str(node.target))(graph)
    return tensor


def convert(graph: GraphModule) -> nn.Module:
    """Convert a graph with known ranges, in place, to the int8 net: inputs (b, ...) -> logits (b, classes)."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e

    for node in graph.graph.nodes:
        if node.target is ATEN.batch_norm.default:  # torchao would search its convolution for half a minute
            x, weight, bias, mean, variance, _, momentum, eps, _ = node.args
            node.target, node.args = F.batch_norm, (x, mean, variance, weight, bias, False, momentum, eps)
    graph = restore_modes(convert_pt2e(graph))
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
