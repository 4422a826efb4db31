"""Capture of a net as a graph of torch's operations, by torch.export."""

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from apprentice import replicas
from apprentice.errors import BadInput, first_line
from apprentice.keyed import is_dropout
from apprentice.private import BatchNorm
from lit_modules.nets.layers import run

NET = "net"  # prefix of the float net's parameters in a graph: net.<name>
ATEN = torch.ops.aten


class _WithFeatures(nn.Module):
    """A net that returns its logits, followed by the outputs of some layers."""

    def __init__(self, net: nn.Module, layers: Sequence[str]) -> None:
        super().__init__()
        self.net, self.layers = net, layers

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        outputs = run(self.net, images, set(self.layers))
        return outputs.logits, *(outputs.features[path] for path in self.layers)


class _Dropout(nn.Module):
    """Replaces any dropout layer during capture, so that it differs from other noise and can be removed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, training=self.training)


def capture(net: nn.Module, example: Tensor, layers: Sequence[str] = ()) -> GraphModule:
    """Capture the net's operations on inputs like `example` (b, ...), with any number of rows, in its current mode.

    The graph returns a tuple: logits (b, classes), and the layers' outputs. Dropout of any kind is `aten.dropout`.
    BadInput if torch.export can't capture the net, it draws other noise, or a BatchNorm has no statistics or does more.
    """
    norms = {path: m for path, m in net.named_modules() if isinstance(m, BatchNorm)}
    for path, norm in norms.items():
        if [*norm.children()]:  # as timm's, with an activation
            raise BadInput("net", type(net).__name__, f"a net with torch's BatchNorm; {path} does more")
    # Autograd counts devices at the first backward, and export registers one more: with threads for it, no fork of this
    # process could run a backward.
    with torch.enable_grad():
        torch.ones(1, requires_grad=True).sum().backward()
    example = example[:1].repeat(3, *[1] * (example.dim() - 1))
    rows = ({0: torch.export.Dim("batch")},)
    try:
        with _plain_layers(net), replicas.shard(0):  # nothing of other ranks is captured
            program = torch.export.export(_WithFeatures(net, layers), (example,), dynamic_shapes=rows)
    except RuntimeError as error:
        expected = f"a net that torch.export can capture for batches of any size; it says: {first_line(error)}"
        raise BadInput("net", type(net).__name__, expected) from error
    graph = program.module(check_guards=False)
    for node in graph.graph.nodes:
        expected = ""
        if draws_noise(node) and not is_dropout(net.get_submodule(path_of(node))):
            where = path_of(node) or "its forward"
            expected = f"draws noise in layers such as nn.Dropout only; {where} calls {node.target}"
        elif node.target is ATEN.batch_norm.default and node.args[3] is None:
            expected = f"has BatchNorm with running statistics; {path_of(node)} has none"
        if expected:
            raise BadInput("net", type(net).__name__, f"a net that {expected}")
        if node.op == "call_function" and (source := _source(node)):
            node.meta["source_fn_stack"] = [source]
    return graph


@contextmanager
def _plain_layers(net: nn.Module) -> Iterator[None]:
    """Inside, the net's BatchNorm and dropout layers have classes whose names the quantiser knows."""
    kinds: dict[nn.Module, Any] = {module: type(module) for module in net.modules()}
    try:
        for module, kind in kinds.items():
            if isinstance(module, BatchNorm):
                module.__class__ = next(k for k in kind.__mro__ if k.__module__.startswith("torch.nn.modules"))
            elif is_dropout(module):
                module.__class__ = _Dropout
        yield
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind


def draws_noise(node: Node) -> bool:
    """Return whether an operation draws random numbers."""
    operation: Any = node.target
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    arguments = operation._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values |= dict(zip(values, node.args, strict=False)) | node.kwargs
    return all(values.get(name, True) for name in ("p", "dropout_p", "dropout", "train", "training"))


def _source(node: Node) -> tuple[str, Any] | None:
    """Return the operation's origin, by which the quantiser finds patterns."""
    origins: dict[Any, Any] = {ATEN.relu.default: nn.ReLU, ATEN.relu_.default: nn.ReLU, ATEN.add.Tensor: operator.add}
    if node.target in origins:
        tensors = all(isinstance(value, Node) for value in node.args)  # it fails at the sum of a tensor and a number
        return node.name, origins[node.target] if tensors else node.target
    path, module = list(node.meta["nn_module_stack"].values())[-1]  # torch 2.11 does not look there itself
    return (path, resolve_name(module)) if module.startswith("torch.nn.modules.") else None


def path_of(node: Node) -> str:
    """Return the path in the net of the module that called the operation; "" is the net itself."""
    path: str = list(node.meta["nn_module_stack"].values())[-1][0]
    return path.removeprefix(NET).removeprefix(".")
