"""Captured graphs with observers or fake quantisers from torchao's PT2E in them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.modules.dropout import _DropoutNd

from apprentice import extras
from apprentice.errors import BadInput
from lit_modules.quantization.capture import ATEN, NET, captured, draws, path_of
from lit_modules.quantization.ranges import Range

EXTRA = ("quant", "torchao")
PT2E = [f"torchao.quantization.pt2e.{name}" for name in ("quantize_pt2e", "quantizer.x86_inductor_quantizer")]


def quantizer(training: bool) -> Any:
    """PT2E's quantiser for x86: activations uint8 per tensor, weights int8 per channel."""
    extras.need(*EXTRA, *PT2E)
    from torchao.quantization.pt2e import FakeQuantize
    from torchao.quantization.pt2e.quantizer import QuantizationSpec
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    if not training:
        return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    activation = QuantizationSpec(
        dtype=torch.uint8, quant_min=0, quant_max=255, qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=FakeQuantize.with_args(observer=Range),
    )  # fmt: skip
    weight = QuantizationSpec(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_channel_symmetric, ch_axis=0,
        observer_or_fake_quant_ctr=FakeQuantize.with_args(observer=partial(Range, averaging_constant=1.0)),
    )  # fmt: skip
    config = x86.QuantizationConfig(activation, activation, weight, None, True)
    return x86.X86InductorQuantizer().set_global(config)


def observed_graph(net: nn.Module, example: Tensor) -> GraphModule:
    """A copy of a trained net with observers, which learn ranges from the batches that run through it."""
    spec = quantizer(training=False)
    from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

    return _quantised(prepare_pt2e(captured(net, example), spec), net)


def trainable_graph(net: nn.Module, example: Tensor, layers: Sequence[str] = ()) -> GraphModule:
    """The net in training mode with fake quantisers, which compute in floats what int8 will give."""
    spec = quantizer(training=True)
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

    graph = with_modes(_quantised(prepare_qat_pt2e(captured(net.train(), example, layers), spec), net))
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


def _quantised(graph: GraphModule, net: nn.Module) -> GraphModule:
    if not any(name.startswith("activation_post_process") for name, _ in graph.named_children()):
        raise BadInput(
            "net", type(net).__name__, "a net with layers that torchao quantises, as nn.Conv2d and nn.Linear"
        )
    return graph


def with_modes(graph: GraphModule) -> GraphModule:
    """The graph with the `train` and `eval` of every module; PT2E removes them."""
    for name in ("train", "eval"):
        vars(graph).pop(name, None)
    return graph


def with_modules(graph: GraphModule, net: nn.Module) -> GraphModule:
    """Replace the graph's BatchNorm and dropout operations by the net's layers: global statistics, keyed noise.

    Parameters and buffers keep their names.
    """
    for node in list(graph.graph.nodes):
        norm = node.target is ATEN.batch_norm.default
        if not norm and not draws(node):
            continue
        own = _norm_path(node) if norm else path_of(node)
        module, path = net.get_submodule(own), f"{NET}.{own}"
        if isinstance(module, _DropoutNd):
            module.inplace = False  # other nodes of the graph may use its input
        known = graph.get_submodule(path) if norm else nn.Module()
        for name, value in [*known.named_parameters(recurse=False), *known.named_buffers(recurse=False)]:
            setattr(module, name, value)
        _put(graph, path, module)
        with graph.graph.inserting_after(node):
            new = graph.graph.call_module(path, (node.args[0],))
        node.replace_all_uses_with(new)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def _norm_path(norm: Node) -> str:
    mean: Any = norm.args[3]
    return str(mean.target).rpartition(".")[0].removeprefix(f"{NET}.")


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.add_module(name, module)
