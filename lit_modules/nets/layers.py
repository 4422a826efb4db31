"""Layers of a net by name, and what they compute."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Outputs, is_chain, typed
from lit_modules.nets.stand_ins import run_without_rows

DEFAULT_LAYER = "default"
MIDDLE = "middle"
INPUT = "<"  # after a submodule's path: what it gets, not what it gives
STAGE = re.compile(r"stage(-?[1-9]\d*)(\.pre)?")


def resolved(net: nn.Module, name: str) -> str:
    """The path of a layer: a submodule's, whose output is meant, or with `<` after it, for its input.

    Names that any net of ours has: "default", its feature layer; "pooled", the classifier's input; "stage1" and so on,
    its stages, from the last "stage-1" backwards; "middle", the one in the middle, the second of three or of four;
    "stage1.pre", the stage before its last ReLU. A net without such a layer gives "".
    """
    known = {DEFAULT_LAYER: getattr(net, "feature_layer", ""), "pooled": getattr(net, "pooled_layer", "")}
    if name in known:
        return known[name]
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
    """The submodule of a layer's name, see `resolved`; if there is none, BadInput says which there are."""
    path, layers = resolved(net, name).removesuffix(INPUT), dict(net.named_modules())
    if not path or path not in layers:
        near = get_close_matches(name, layers) if needs else list(layers)[1:40]
        known = f" ({needs})" * bool(needs) + f"; it has {', '.join(near)}" * bool(near)
        raise BadInput(flag, name, f"a layer of {type(net).__name__} that objectives can compare{known}")
    return layers[path]


def heads(net: nn.Module, flag: str = "net") -> list[nn.Module]:
    """The linear layers that give a net's logits: its `head_layers`, or the last layer of what gets `pooled` features.

    Raises:
        BadInput: the net names neither, or the layer is not linear, or the net uses its weight elsewhere, too.
    """
    layers, path = dict(net.named_modules()), resolved(net, "pooled").removesuffix(INPUT)
    classifier = layers[path].modules() if path else ()
    last = [module for module in classifier if any(True for _ in module.parameters(recurse=False))][-1:]
    found = [layers[name] for name in getattr(net, "head_layers", ())] or last
    if not found or not all(isinstance(head, nn.Linear) for head in found):
        expected = "a net that names its classifier, by its attribute pooled_layer, and ends in a linear layer"
        raise BadInput(flag, type(net).__name__, expected)
    own = {p for head in found for p in head.parameters()}
    uses = [name for name, p in net.named_parameters(remove_duplicate=False) if p in own]
    if len(uses) > len(own):
        raise BadInput(flag, type(net).__name__, f"a net whose head has weights of its own; {uses[0]} is one of them")
    return found


@contextmanager
def observed(layers: Mapping[str, nn.Module], inputs: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """A dict that collects the outputs of these modules by name while they run inside the block.

    For the names in `inputs` it collects the module's first input. Of several calls it keeps the last.
    """
    found: dict[str, Any] = {}

    def keep(name: str, _module: nn.Module, _inputs: tuple, output: Any) -> None:
        found[name] = output

    def keep_input(name: str, module: nn.Module, given: tuple) -> None:
        found[name] = given[0].clone() if getattr(module, "inplace", False) else given[0]

    handles = [
        module.register_forward_pre_hook(partial(keep_input, name))
        if name in inputs
        else module.register_forward_hook(partial(keep, name))
        for name, module in layers.items()
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def run(net: nn.Module, inputs: Tensor, names: Collection[str] = ()) -> Outputs:
    """The net's outputs for inputs (b, ...), floats in its type, with the features of these layers.

    If b is 0, see `run_without_rows`.
    """
    if inputs.shape[0] == 0:  # not by `len`, which torch.export takes for a constant
        return run_without_rows(lambda rows: run(net, rows, names), inputs)
    with observed({name: layer(net, name) for name in sorted(names)}, of_inputs(net, names)) as features:
        logits = net(typed(net, inputs))
    return Outputs(logits, features)


def of_inputs(net: nn.Module, names: Collection[str]) -> set[str]:
    """Those of the names that mean a module's input."""
    return {name for name in names if resolved(net, name).endswith(INPUT)}


def stage_of(net: nn.Module, stages: Sequence[nn.Module], name: str, flag: str = "layer") -> tuple[int, nn.Module]:
    """The number of the pipeline stage that computes a layer, and the module that does; BadInput if there is none.

    That is the layer itself, or the last member of a sequence that was split, the first for its input.
    """
    module, member = layer(net, name, flag), 0 if of_inputs(net, [name]) else -1
    while True:
        for number, stage in enumerate(stages):
            if module in set(stage.modules()):
                return number, module
        if not is_chain(module):
            expected = f"a layer of {type(net).__name__} inside a pipeline stage, or a sequence of such"
            raise BadInput(flag, name, expected)
        module = list(module.children())[member]
