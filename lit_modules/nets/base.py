"""What every net of the suite has in common, and what is asked of anyone else's."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput
from apprentice.keyed import with_seed

DEFAULT_LAYER = "default"


class Outputs(NamedTuple):
    """What a net computed for b inputs: logits (b, ..., classes) and the features of the layers that were asked for."""

    logits: Tensor
    features: dict[str, Tensor]


class Net(nn.Module):
    """A classifier of inputs (B, ...), such as images (B, C, H, W), whose `forward` gives logits (B, classes).

    Subclasses take `input_shape` and `num_classes` by keyword; the data module's are passed to them. One that can be
    cut for a pipeline has `pipeline_stages()`: modules in order, as fine as is useful, whose composition is `forward`.

    Attributes:
        feature_layer: path of the submodule whose output objectives compare unless told otherwise.
    """

    feature_layer: str


def of_images(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """The shape, if it is that of images.

    Raises:
        ValueError: it is that of something else.
    """
    if len(input_shape) != 3:
        raise ValueError(f"input_shape {tuple(input_shape)}: expected (C, H, W), images")
    channels, height, width = input_shape
    return channels, height, width


def layer(net: nn.Module, path: str, flag: str = "layer", needs: str = "") -> nn.Module:
    """The submodule at `path`; "default" is the net's own feature layer, `needs` what else the message should say.

    Raises:
        BadInput: the net has no such layer; the message lists those it has.
    """
    name = getattr(net, "feature_layer", "") if path == DEFAULT_LAYER else path
    layers = dict(net.named_modules())
    if not name or name not in layers:
        known = ", ".join(n for n in list(layers)[1:40])
        wanted = f"a layer of {type(net).__name__} that objectives can compare{f' ({needs})' if needs else ''}"
        raise BadInput(flag, path, f"{wanted}; it has {known}")
    return layers[name]


def check_fits(
    net: nn.Module, example: Tensor, logits_shape: Sequence[int], flag: str = "net", trained: bool = True
) -> None:
    """Try a copy of the net on an example, as it is trained and as it is tested.

    Args:
        net: the net.
        example: (b, ...) of its inputs, b at least 2.
        logits_shape: what the net has to give for one of them.
        flag: where it was chosen.
        trained: whether it is going to be trained.

    Raises:
        BadInput: it can't take such inputs, or gives something else; or what the net itself refuses.
    """
    name, shape = type(net).__name__, tuple(example.shape[1:])
    tried = copy.deepcopy(net)  # training changes BatchNorm's statistics
    for mode in (True, False) if trained else (False,):
        found: Any = None
        try:
            with torch.no_grad():
                found = with_seed(0, partial(tried.train(mode), typed(tried, example)))
        except BadInput as fault:
            raise BadInput(f"{flag}.{fault.flag}", fault.value, fault.expected) from None
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            wanted = f"a net that takes inputs {shape}, as this data has them"
            raise BadInput(flag, name, f"{wanted}; it says: {str(error).splitlines()[0]}") from None
        if not isinstance(found, Tensor) or tuple(found.shape) != (len(example), *logits_shape):
            given = tuple(found.shape[1:]) if isinstance(found, Tensor) else type(found).__name__
            raise BadInput(flag, name, f"a net that gives logits {tuple(logits_shape)} for an input; it gives {given}")


def check_same_start(net: nn.Module, again: nn.Module, flag: str = "net") -> None:
    """See that the first weights of two nets that were made with one seed are the same.

    Raises:
        BadInput: they differ; the message names the first that does.
    """
    first, second = net.state_dict(), again.state_dict()
    made = [key for key, x in first.items() if isinstance(x, Tensor) and not nn.parameter.is_lazy(x)]
    if differ := [key for key in made if not _equal(first[key], second[key])]:
        sources = "torch's, numpy's and Python's global random numbers"
        told = f"two made with one seed differ in {differ[0]}"
        raise BadInput(flag, type(net).__name__, f"a net whose first weights come from {sources} alone; {told}")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same elements; NaN is like NaN."""
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def typed(net: nn.Module, inputs: Tensor) -> Tensor:
    """The inputs, floats in the type of the net's parameters."""
    return inputs.to(next(net.parameters()).dtype) if inputs.is_floating_point() else inputs


@contextmanager
def observed(net: nn.Module, paths: set[str]) -> Iterator[dict[str, Tensor]]:
    """The outputs of the named submodules, filled in while the net runs inside the block."""
    features: dict[str, Tensor] = {}

    def keep(path: str) -> nn.Module:
        def hook(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
            features[path] = output

        return hook  # type: ignore[return-value]

    handles = [layer(net, path).register_forward_hook(keep(path)) for path in sorted(paths)]
    try:
        yield features
    finally:
        for handle in handles:
            handle.remove()


def run(net: nn.Module, inputs: Tensor, paths: set[str]) -> Outputs:
    """The net's outputs for inputs (b, ...), with the features at `paths`."""
    with observed(net, paths) as features:
        logits = net(inputs)
    return Outputs(logits, features)
