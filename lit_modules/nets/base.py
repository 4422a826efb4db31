"""What the suite's nets share, and how any net is used: its layers, its pipeline stages, whether it fits the data."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput, reason
from apprentice.keyed import with_seed
from lit_modules.nets.recorded import Recorded

Shape = tuple[int, int, int]  # (C, H, W)
Norm = Literal["batch", "group"]


class Outputs(NamedTuple):
    """What a net computed for b inputs: logits (b, ..., classes), and features of the requested layers by path."""

    logits: Tensor
    features: dict[str, Tensor]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Outputs":
        """The outputs with a function applied to the logits and to each feature, in this order."""
        return Outputs(function(self.logits), {path: function(x) for path, x in self.features.items()})

    def tensors(self) -> list[Tensor]:
        """The logits and the features."""
        return [self.logits, *self.features.values()]


class Net(Recorded, nn.Module):
    """A classifier of inputs (B, ...), such as images (B, C, H, W), whose `forward` gives logits (B, classes).

    Subclasses take `input_shape` and `num_classes` by keyword, from the data module. To be cut for a pipeline, define
    `pipeline_stages()`: ordered modules, as fine as is useful, whose composition is `forward`.

    Attributes:
        feature_layer: layer whose output objectives compare by default; for its name, and those below, see `layer`.
        stages: layers that end a stage: the last of each map size (B, C, H, W), without the stem, or the last of each
            block of tokens (B, T, D).
        preactivations: for each stage the same before its last ReLU, if there is one.
        pooled_layer: the classifier's input, such as pooled features (B, D).
        head_layers: the linear layers that give the logits, if they are more than the last one after `pooled_layer`.
        is_trained: whether it is made of trained nets, and is not trained itself.
        trained_if: the option by which its weights are trained ones; "" for none.
        class_names: of the classes that its first weights give logits of, in order; () where these are not named, None
            where weights are new, or those of the head.
        expects: the `mean` and `std` of the images that its first weights were trained on, if they were.
    """

    feature_layer: str
    stages: tuple[str, ...] = ()
    preactivations: tuple[str, ...] = ()
    pooled_layer: str = ""
    head_layers: tuple[str, ...] = ()
    is_trained: bool = False
    trained_if: str = ""
    class_names: tuple[str, ...] | None = None
    expects: Mapping[str, tuple[float, ...]] = MappingProxyType({})

    @classmethod
    def tokenizer_from(cls, options: Mapping[str, Any]) -> str | None:  # noqa: ARG003
        """The Hugging Face tokenizer of texts for a net made with these options; None if its weights know no tokens."""
        return None


def of_images(input_shape: Sequence[int]) -> Shape:
    """The shape, if it is that of images; raises ValueError otherwise."""
    if len(input_shape) != 3:
        raise ValueError(f"input_shape {tuple(input_shape)}: expected (C, H, W), images")
    channels, height, width = input_shape
    return channels, height, width


def check_widths(widths: Sequence[int], count: int) -> Sequence[int]:
    """The widths; ValueError if they aren't `count` numbers of channels."""
    if len(widths) != count or min(widths) < 1:
        raise ValueError(f"widths {list(widths)}: expected {count} numbers of channels, each at least 1")
    return widths


def check_sizes(**sizes: int) -> None:
    """ValueError for the first that is less than 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} {size}: expected at least 1")


def norm_layer(norm: Norm) -> Callable[[int], nn.Module]:
    """A function from a number of channels to their norm; ValueError if there is no norm of this name."""
    makers: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": group_norm}
    if norm not in makers:
        raise ValueError(f"norm {norm}: expected {' or '.join(makers)}")
    return makers[norm]


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm (Wu and He 2018) with as many equal groups as possible: at most 32, as there, of 8 channels or more."""
    groups = range(max(1, min(32, channels // 8)), 0, -1)
    return nn.GroupNorm(next(n for n in groups if channels % n == 0), channels)


class Mean(nn.Module):
    """The mean over positions: (B, C, H, W) -> (B, C)."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x.mean((2, 3))


def typed(net: nn.Module, inputs: Tensor) -> Tensor:
    """The inputs; floats get the type of the net's parameters, if it has some."""
    dtype = next((p.dtype for p in net.parameters()), inputs.dtype)
    # A conversion to the same type would be captured in a graph, which then takes no other.
    return inputs.to(dtype) if inputs.is_floating_point() and inputs.dtype != dtype else inputs


def in_type_of(outputs: Outputs, net: nn.Module) -> Outputs:
    """Another net's outputs; float64 becomes float32 unless this net's parameters are float64."""
    if all(x.dtype != torch.float64 for x in outputs.tensors()):
        return outputs
    if any(p.dtype == torch.float64 for p in net.parameters()):
        return outputs
    return outputs.map(lambda x: x.float() if x.dtype == torch.float64 else x)


def giving_logits(net: nn.Module) -> nn.Module:
    """The net; if it gives a tuple, a mapping or an object, its first entry, or "logits", is what it gives from now on.

    So do many libraries' models. Outputs that are tensors stay.
    """
    if not isinstance(net, Net) and _logits not in net._forward_hooks.values():
        net.register_forward_hook(_logits)
    return net


def _logits(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    found = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
    return found if isinstance(found, Tensor) else output


def pipeline_stages(net: nn.Module, flag: str = "net") -> list[nn.Module]:
    """Modules whose composition is the net's forward: its `pipeline_stages()`, or a sequence's parts; else BadInput."""
    if (own := getattr(net, "pipeline_stages", None)) is not None:
        return own()
    if is_chain(net):
        return cuttable(net.children())
    raise BadInput(flag, type(net).__name__, "a net that can be cut: with pipeline_stages(), or an nn.Sequential")


def cuttable(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules, with sequences split into their members, and in-place modules joined to their predecessors."""
    groups: list[list[nn.Module]] = []
    for module in _members(modules):
        if groups and getattr(module, "inplace", False):  # it would change a tensor that others may still read
            groups[-1].append(module)
        else:
            groups.append([module])
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]


def _members(modules: Iterable[nn.Module]) -> list[nn.Module]:
    # Subclasses of Sequential, such as a convolution with its norm, stay whole.
    return [part for m in modules for part in (_members(m) if type(m) is nn.Sequential else [m])]


def is_chain(module: nn.Module) -> bool:
    """Whether a module is a plain sequence, which calls its members in order."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def check_fits(
    net: nn.Module, example: Tensor, logits_shape: Sequence[int], flag: str = "net", trained: bool = True
) -> None:
    """BadInput if a copy of the net fails on inputs (b, ...), b at least 2, in eval or, if `trained`, training mode.

    If `trained`, its logits must depend on parameters that can learn.
    """
    name, shape = type(net).__name__, tuple(example.shape[1:])
    _check_parameters(net, flag)
    tried = copy.deepcopy(net)  # training changes BatchNorm's statistics
    for mode in (True, False) if trained else (False,):
        found: Any = None
        try:
            with torch.set_grad_enabled(mode):
                found = with_seed(0, partial(tried.train(mode), typed(tried, example)))
        except BadInput as fault:
            raise BadInput(f"{flag}.{fault.flag}", fault.value, fault.expected) from None
        except Exception as error:  # noqa: BLE001 - whatever a user's net does
            wanted = f"a net that takes inputs {shape}, as this data has them"
            raise BadInput(flag, name, f"{wanted}; it says: {reason(error)}") from None
        if not isinstance(found, Tensor) or tuple(found.shape) != (len(example), *logits_shape):
            given = tuple(found.shape[1:]) if isinstance(found, Tensor) else type(found).__name__
            raise BadInput(flag, name, f"a net that gives logits {tuple(logits_shape)} for an input; it gives {given}")
        if mode and not found.requires_grad:
            frozen = not any(p.requires_grad for p in net.parameters())
            why = "all of its parameters are frozen" if frozen else "its logits have no gradient"
            raise BadInput(flag, name, f"a net that can be trained; {why}")


def _check_parameters(net: nn.Module, flag: str) -> None:
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    if not any(True for _ in net.parameters()):
        raise BadInput(flag, type(net).__name__, "a net with parameters; it has none")
    if lazy := [key for key, x in state.items() if nn.parameter.is_lazy(x)]:
        expected = f"a net whose first weights are made with it, from the seed; {lazy[0]} is of a lazy module"
        raise BadInput(flag, type(net).__name__, expected)


def check_same_start(net: nn.Module, again: nn.Module, flag: str = "net") -> None:
    """Raise BadInput, which names the first difference, if two nets made with one seed differ in initial weights."""
    first, second = net.state_dict(), again.state_dict()
    made = [key for key, x in first.items() if isinstance(x, Tensor) and not nn.parameter.is_lazy(x)]
    same = {key: first[key].shape == second[key].shape and first[key].allclose(second[key], 0, 0, True) for key in made}
    if differ := [key for key in made if not same[key]]:
        sources = "torch's, numpy's and Python's global random numbers"
        found = f"two made with one seed differ in {differ[0]}"
        raise BadInput(flag, type(net).__name__, f"a net whose first weights come from {sources} alone; {found}")
