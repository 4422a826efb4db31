"""Layers of a net by name, and what they compute; stand-ins for a batch without rows, which many nets can't take."""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from apprentice import keyed
from apprentice.errors import BadInput, reason
from apprentice.private import tree_map_only
from lit_modules.nets.base import cast_inputs, evaluating, is_chain
from lit_modules.nets.outputs import Outputs

DEFAULT_LAYER = "default"
MIDDLE = "middle"
INPUT = "<"  # after a submodule's path: its input, not its output
Result = TypeVar("Result")
ROUNDINGS, PLACES = 8, 1e-4  # of the largest logit: between texts beside other ones, and at other places of a row
STAGE = re.compile(r"stage(-?[1-9]\d*)(\.pre)?")
_computing_stand_ins: ContextVar[bool] = ContextVar("computing", default=False)


def resolve(net: nn.Module, name: str) -> str:
    """Return the path of a layer: that of a submodule, for its output, with `<` after it for its input.

    Names that any net of ours has: "default", its feature layer; "pooled", the classifier's input; "stage1" and so on,
    its stages, from the last "stage-1" backwards; "middle", the stage in the middle, the second of three or of four;
    "stage1.pre", the stage before its last ReLU. The path of a layer that a net does not have is "".
    """
    aliases = {DEFAULT_LAYER: getattr(net, "feature_layer", ""), "pooled": getattr(net, "pooled_layer", "")}
    if name in aliases:
        return aliases[name]
    modules = dict(net.named_modules())
    if name == MIDDLE and name not in modules:
        stages = getattr(net, "stages", ())
        return stages[(len(stages) - 1) // 2] if stages else ""
    if not (match := STAGE.fullmatch(name)) or name in modules:
        return name
    stages = getattr(net, "preactivations" if match[2] else "stages", ())
    number = int(match[1])
    return stages[number - (number > 0)] if -len(stages) <= number <= len(stages) else ""


def layer(net: nn.Module, name: str, flag: str = "layer", needs: str = "") -> nn.Module:
    """Return the submodule of a layer's name (see `resolve`); raise BadInput, with near names, if there is none."""
    path = resolve(net, name).removesuffix(INPUT)
    layers: dict[str, nn.Module] = dict(net.named_modules())
    if not path or path not in layers:
        near = get_close_matches(name, layers) if needs else list(layers)[1:40]
        hint = (f" ({needs})" if needs else "") + (f"; it has {', '.join(near)}" if near else "")
        raise BadInput(flag, name, f"a layer of {type(net).__name__} that objectives can compare{hint}")
    return layers[path]


def heads(net: nn.Module, flag: str = "net") -> list[nn.Module]:
    """Return the linear layers that give a net's logits: its `head_layers`, or the last layer after `pooled_layer`.

    BadInput if the net names neither, the layer is not linear, or the net uses its weight elsewhere, too.
    """
    layers, path = dict(net.named_modules()), resolve(net, "pooled").removesuffix(INPUT)
    classifier = layers[path].modules() if path else ()
    last = [module for module in classifier if any(True for _ in module.parameters(recurse=False))][-1:]
    linear = [layers[name] for name in getattr(net, "head_layers", ())] or last
    if not linear or not all(isinstance(head, nn.Linear) for head in linear):
        expected = "a net that names its classifier, by its attribute pooled_layer, and ends in a linear layer"
        raise BadInput(flag, type(net).__name__, expected)
    parameters = {p for head in linear for p in head.parameters()}
    uses = [name for name, p in net.named_parameters(remove_duplicate=False) if p in parameters]
    if len(uses) > len(parameters):
        raise BadInput(flag, type(net).__name__, f"a net whose head has weights of its own; {uses[0]} is one of them")
    return linear


@contextmanager
def observe(layers: Mapping[str, nn.Module], inputs: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """Inside, collect the outputs of these modules by name in the dict; for names in `inputs`, the first input.

    Of several calls of a module it holds the last.
    """
    features: dict[str, Any] = {}

    def keep(name: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
        features[name] = output
        # The net goes on with a view, in which the gradients of all its readers are added before that of the feature:
        # so a pipeline adds them, to which floats give other bits in another order.
        return output.view_as(output) if isinstance(output, Tensor) and output.requires_grad else None

    def keep_input(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        features[name] = args[0].clone() if getattr(module, "inplace", False) else args[0]

    handles = [
        module.register_forward_pre_hook(partial(keep_input, name))
        if name in inputs
        else module.register_forward_hook(partial(keep, name))
        for name, module in layers.items()
    ]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


def run(net: nn.Module, inputs: Tensor, names: Collection[str] = (), beside: Sequence[Tensor] = ()) -> Outputs:
    """Run the net on inputs (b, ...), floats in its type; return its outputs with the features of these layers.

    `beside` are more inputs (b, ...), such as `Batch.starts`. If b is 0, stand-ins are computed (see
    `run_without_rows`).
    """
    if inputs.shape[0] == 0:  # not by `len`, which torch.export takes for a constant
        return run_without_rows(lambda rows: run(net, rows, names), inputs)
    with observe({name: layer(net, name) for name in sorted(names)}, input_names(net, names)) as features:
        logits = net(cast_inputs(net, inputs), *beside)
    return Outputs(logits, features)


@torch.no_grad()
def check_keeps_apart(net: nn.Module, flag: str) -> None:
    """Raise BadInput unless `net(tokens, starts)` computes each of several texts in a row as if it were alone."""
    tokens, other = torch.tensor([[1, 2, 0, 3, 1]] * 2), torch.tensor([[3, 0, 0, 3, 1]] * 2)
    starts = torch.tensor([[0, 0, 2, 2, 2]] * 2)
    kind = type(net).__name__
    unable = f"false: {kind}, chosen by `{flag}`, can't keep apart the texts of a row"
    if "starts" not in inspect.signature(net.forward).parameters:
        raise BadInput("data.pack", True, unable)
    with evaluating(net):
        try:
            packed, beside_other = (net(texts, starts)[:, 2:] for texts in (tokens, other))
        except TypeError as error:  # of a user's mixer that takes no mask
            raise BadInput("data.pack", True, f"{unable}; it says: {reason(error)}") from None
        alone = net(tokens[:, 2:])
    # A net that is new has logits of nearly the same size for all texts: what is mixed shows beside the rounding alone.
    rounding = ROUNDINGS * torch.finfo(alone.dtype).eps
    largest = alone.abs().max()
    keeps_apart = (packed - beside_other).abs().max() <= rounding * largest
    if not keeps_apart or not (packed - alone).abs().max() <= max(rounding, PLACES) * largest:
        raise BadInput("data.pack", True, f"false: {kind}, chosen by `{flag}`, mixes the texts of a row")


def input_names(net: nn.Module, names: Collection[str]) -> set[str]:
    """Return the names that mean a module's input."""
    return {name for name in names if resolve(net, name).endswith(INPUT)}


def find_stage(net: nn.Module, stages: Sequence[nn.Module], name: str, flag: str = "layer") -> tuple[int, nn.Module]:
    """Return the number of the pipeline stage that computes a layer, and the module in it that does; or raise BadInput.

    That is the layer itself or, of a sequence that was split, its last member; its first for the input.
    """
    module, member = layer(net, name, flag), 0 if input_names(net, [name]) else -1
    while True:
        for number, stage in enumerate(stages):
            if module in set(stage.modules()):
                return number, module
        if not is_chain(module):
            expected = f"a layer of {type(net).__name__} inside a pipeline stage, or a sequence of such"
            raise BadInput(flag, name, expected)
        module = list(module.children())[member]


def run_without_rows(compute: Callable[[Tensor], Result], inputs: Tensor) -> Result:
    """Return what a net computes for inputs (0, ...), by computing two stand-in rows, which count nowhere."""
    rows = torch.arange(2, device=inputs.device)  # two, as torch's BatchNorm refuses one
    shape = inputs.shape[1:]
    noise = keyed.bits(0, rows, shape.numel()).view(-1, *shape) / 2**32  # below 1: integers are all 0
    token = _computing_stand_ins.set(True)
    try:
        with keyed.noise(0, 0, rows):
            outputs = compute(noise.to(inputs.dtype))
    finally:
        _computing_stand_ins.reset(token)
    no_rows: Result = tree_map_only(Tensor, lambda x: x[:0], outputs)
    return no_rows


def drop_stand_ins(x: Tensor) -> Tensor:
    """Return the rows of x (b, ...) that count in statistics: all, or none if they are stand-ins."""
    return x[:0] if _computing_stand_ins.get() else x
