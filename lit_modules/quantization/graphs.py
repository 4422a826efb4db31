"""A net as a graph of torch's operations, with what quantisation does to it."""

import operator
from collections.abc import Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from apprentice import extras, replicas
from apprentice.errors import BadInput
from apprentice.keyed import is_dropout
from lit_modules.nets.base import run
from lit_modules.quantization.ranges import Range

NET = "net"  # where the float net's parameters are in a graph: net.<name>
ATEN = torch.ops.aten
EXTRA = ("quant", "torchao")
PT2E = [f"torchao.quantization.pt2e.{name}" for name in ("quantize_pt2e", "quantizer.x86_inductor_quantizer")]


class _Tapped(nn.Module):
    """A net that gives its logits and, after them, the outputs of some layers."""

    def __init__(self, net: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()
        self.net, self.layers = net, layers

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        logits, features = run(self.net, images, set(self.layers))
        return logits, *(features[path] for path in self.layers)


def captured(net: nn.Module, example: Tensor, layers: Sequence[str] = ()) -> GraphModule:
    """The net's operations on inputs like `example` (b, ...) of any number of rows, in the mode that it is in.

    It gives a tuple: logits (b, classes), and the outputs of the layers. Layers of dropout, of any kind, are
    `aten.dropout` there.

    Raises:
        BadInput: torch.export can't capture it; it draws noise outside of such layers; a BatchNorm has no statistics.
    """
    # Autograd counts devices at the first backward, and export registers one more: with threads for it no fork of this
    # process could go backward.
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()
    kinds: dict[nn.Module, Any] = {module: type(module) for module in net.modules()}
    try:
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.__class__ = _plain(module)  # the quantiser knows torch's own by their names
            elif is_dropout(module):
                module.__class__ = _Drop
        example = example[:1].repeat(3, *[1] * (example.dim() - 1))
        with replicas.shard(0):  # nothing of other ranks is captured
            program = torch.export.export(
                _Tapped(net, layers), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
    except RuntimeError as error:
        said = f"a net that torch.export can capture for batches of any size; it says: {str(error).splitlines()[0]}"
        raise BadInput("net", type(net).__name__, said) from error
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
    graph = program.module(check_guards=False)
    for node in graph.graph.nodes:
        wanted = ""
        if _draws(node) and not is_dropout(net.get_submodule(_path(node))):
            wanted = (
                f"draws noise in layers such as nn.Dropout only; {_path(node) or 'its forward'} calls {node.target}"
            )
        elif node.target is ATEN.batch_norm.default and node.args[3] is None:
            wanted = f"has BatchNorm with running statistics; {_path(node)} has none"
        if wanted:
            raise BadInput("net", type(net).__name__, f"a net that {wanted}")
        if node.op == "call_function" and (source := _source(node)):
            node.meta["source_fn_stack"] = [source]
    return graph


class _Drop(nn.Module):
    """What a layer of dropout is while it is captured, so that it can be told from other noise, and taken out."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, training=self.training)


def _draws(node: Node) -> bool:
    """Whether an operation takes random numbers."""
    operation: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    arguments = operation._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return all(given.get(name, True) for name in ("p", "dropout_p", "dropout", "train", "training"))


def _source(node: Node) -> tuple[str, Any] | None:
    """Where an operation comes from, as the quantiser looks for what it takes together."""
    known: dict[Any, Any] = {ATEN.relu.default: nn.ReLU, ATEN.relu_.default: nn.ReLU, ATEN.add.Tensor: operator.add}
    if node.target in known:
        tensors = all(isinstance(value, Node) for value in node.args)  # it fails at the sum of a tensor and a number
        return node.name, known[node.target] if tensors else node.target
    path, module = list(node.meta["nn_module_stack"].values())[-1]  # where torch 2.11 does not look by itself
    return (path, resolve_name(module)) if module.startswith("torch.nn.modules.") else None


def _path(node: Node) -> str:
    """Of the module, in its net, that asked for the operation; "" is the net itself."""
    return list(node.meta["nn_module_stack"].values())[-1][0].removeprefix(NET).removeprefix(".")


def _plain(module: nn.Module) -> Any:
    return next(kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules"))


def quantizer(training: bool) -> Any:
    """What says which tensors become int8, for x86: activations uint8, weights int8 a channel.

    Args:
        training: whether ranges are learnt in training, or observed once after it.

    Raises:
        Missing: torchao is not there.
    """
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


def prepared(net: nn.Module, example: Tensor, layers: Sequence[str] = ()) -> GraphModule:
    """The net in training with fake quantisers in it, which compute in floats what int8 will give.

    Raises:
        BadInput: as of `captured` and `observing`.
    """
    spec = quantizer(training=True)
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e

    graph = trainable(observing(prepare_qat_pt2e(captured(net.train(), example, layers), spec), net))
    for node in list(graph.graph.nodes):
        if node.target is ATEN.add_.Tensor and str(node.args[0].target).endswith("num_batches_tracked"):
            graph.graph.erase_node(node)  # the modules count
        if node.target is ATEN.batch_norm.default:
            eps = net.get_submodule(_owner(node)).eps
            for user in list(node.args[4].users):
                user.update_arg(7 if user is node else 1, eps)  # torchao 0.18 writes 1e-5 for any
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def observing(graph: GraphModule, net: nn.Module) -> GraphModule:
    """A prepared graph of the net.

    Raises:
        BadInput: nothing in it would be int8.
    """
    if not any(name.startswith("activation_post_process") for name, _ in graph.named_children()):
        wanted = "a net with layers that torchao quantises, such as nn.Conv2d and nn.Linear"
        raise BadInput("net", type(net).__name__, wanted)
    return graph


def trainable(graph: GraphModule) -> GraphModule:
    """The graph with `train` and `eval` as every module has them; PT2E takes them away."""
    for name in ("train", "eval"):
        vars(graph).pop(name, None)
    return graph


def with_modules(graph: GraphModule, net: nn.Module) -> GraphModule:
    """The graph with the net's own BatchNorm and dropout for torch's: over the global batch, with keyed noise.

    Its parameters and buffers keep their names.
    """
    for node in list(graph.graph.nodes):
        norm = node.target is ATEN.batch_norm.default
        if not norm and not _draws(node):
            continue
        own = _owner(node) if norm else _path(node)
        module, path = net.get_submodule(own), f"{NET}.{own}"
        if isinstance(module, _DropoutNd):
            module.inplace = False  # in the graph others may use what it is given
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


def _owner(norm: Node) -> str:
    """The path of a BatchNorm in its net."""
    mean: Any = norm.args[3]
    return str(mean.target).rpartition(".")[0].removeprefix(f"{NET}.")


def _put(root: nn.Module, path: str, module: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = getattr(root, parent)
    root.add_module(name, module)


def folded(graph: GraphModule) -> GraphModule:
    """A prepared graph for inference: dropout is gone, and each BatchNorm is part of the convolution before it.

    Source: Krishnamoorthi 2018, "Quantizing deep convolutional networks for efficient inference", section 3.2.2: what
    training has simulated. torchao does the same by matching patterns, which takes it half a minute.
    """
    for node in list(graph.graph.nodes):
        if _draws(node):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)  # no dead code to torch, which keeps what takes random numbers
        elif node.target is ATEN.batch_norm.default:
            _fold(graph, node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def _fold(graph: GraphModule, norm: Node) -> None:
    """Make a BatchNorm's convolution do its work, if there is one that was scaled for it."""
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
    """Give the weights of a folded graph their ranges of now; training knows those of the step before."""
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
        if node.target is ATEN.batch_norm.default:  # torchao would look for its convolution, for half a minute
            x, weight, bias, mean, variance, _, momentum, eps, _ = node.args
            node.target, node.args = F.batch_norm, (x, mean, variance, weight, bias, False, momentum, eps)
    graph = trainable(convert_pt2e(graph))
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    output.args = (output.args[0][0],)
    graph.graph.eliminate_dead_code()
    graph.graph.set_codegen(torch.fx.graph.CodeGen())
    used = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for path in [*dict(graph.named_parameters()), *dict(graph.named_buffers())]:
        if path not in used:  # the floats that the int8 weights were made of
            owner, _, name = path.rpartition(".")
            delattr(graph.get_submodule(owner), name)
    graph.delete_all_unused_submodules()
    graph.recompile()
    return graph.requires_grad_(False).eval()
