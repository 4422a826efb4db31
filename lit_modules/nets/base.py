"""What all nets of the suite share, and how layers of any net are found and observed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from apprentice.errors import BadInput

DEFAULT_LAYER = "default"


class Outputs(NamedTuple):
    """What a net computed for b inputs: logits (b, ..., classes), and features of the requested layers by path."""

    logits: Tensor
    features: dict[str, Tensor]


class Net(nn.Module):
    """A classifier of inputs (B, ...), such as images (B, C, H, W), whose `forward` gives logits (B, classes).

    Subclasses take `input_shape` and `num_classes` by keyword, from the data module. To be cut for a pipeline, define
    `pipeline_stages()`: ordered modules, as fine as is useful, whose composition is `forward`.

    Attributes:
        feature_layer: path of the submodule whose output objectives compare by default.
    """

    feature_layer: str


def of_images(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """The shape, if it is that of images; raises ValueError otherwise."""
    if len(input_shape) != 3:
        raise ValueError(f"input_shape {tuple(input_shape)}: expected (C, H, W), images")
    channels, height, width = input_shape
    return channels, height, width


def layer(net: nn.Module, path: str, flag: str = "layer", needs: str = "") -> nn.Module:
    """The submodule at `path`, "default" for the net's feature layer; if there is none, BadInput lists the layers."""
    name = getattr(net, "feature_layer", "") if path == DEFAULT_LAYER else path
    layers = dict(net.named_modules())
    if not name or name not in layers:
        known = ", ".join(n for n in list(layers)[1:40])
        wanted = f"a layer of {type(net).__name__} that objectives can compare{f' ({needs})' if needs else ''}"
        raise BadInput(flag, path, f"{wanted}; it has {known}")
    return layers[name]


def typed(net: nn.Module, inputs: Tensor) -> Tensor:
    """The inputs; floats get the type of the net's parameters."""
    return inputs.to(next(net.parameters()).dtype) if inputs.is_floating_point() else inputs


@contextmanager
def observed(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Any]]:
    """A dict that collects the outputs of these modules by name while they run inside the block."""
    outputs: dict[str, Any] = {}

    def keep(name: str, _module: nn.Module, _inputs: tuple, output: Any) -> None:
        outputs[name] = output

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in layers.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def run(net: nn.Module, inputs: Tensor, paths: set[str]) -> Outputs:
    """The net's outputs for inputs (b, ...), with the features at `paths`."""
    with observed({path: layer(net, path) for path in sorted(paths)}) as features:
        logits = net(inputs)
    return Outputs(logits, features)
