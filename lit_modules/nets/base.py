"""The base class of the suite's nets; pipeline stages of any net, and checks whether a net fits the data."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from apprentice.errors import BadInput, reason
from apprentice.keyed import with_seed
from lit_modules.nets.specs import Recorded
from lit_modules.nets.tokens import TokenGrid

Shape = tuple[int, int, int]  # (C, H, W)
Norm = Literal["batch", "group"]


class Net(Recorded, nn.Module):
    """A classifier of inputs (B, ...), such as images (B, C, H, W), whose `forward` gives logits (B, classes).

    Subclasses take `input_shape`, such as (C, H, W), and `num_classes`, the number of logits, by keyword, from the data
    module. To be cut for a pipeline, define `pipeline_stages()`: ordered modules, as fine as is useful, whose
    composition is `forward`.

    Attributes:
        feature_layer: name of the layer whose output objectives compare by default; see `layer` for names of layers.
        stages: names of the layers that end a stage: the last of each map size (B, C, H, W), without the stem, or the
            last of each block of tokens (B, T, D).
        preactivations: each stage's output before its last ReLU, if there is one.
        token_grid: where tokens of patches stand in the image; objectives then compare them as maps.
        pooled_layer: the classifier's input, such as pooled features (B, D).
        head_layers: the linear layers that give the logits, if more than the last one after `pooled_layer`.
        inner: the child that is the whole net, as another library has it; weights are saved under that net's names.
        is_trained: whether it consists of trained nets, and is not trained itself.
        embeds: whether its outputs are embeddings, which no classifier of its own follows.
        ranks: whether its outputs are scores (b, k - 1) of the other texts of a row for its first one.
        is_comparable: whether its logits are of a student's classes, one by one.
        kept_blocks: numbers of the blocks that it has of a larger net; () if it is not a part of one.
        trained_if: the option by which its weights are trained ones; "" for none.
        class_names: names of the classes of its initial weights, in order; () if these have no names, None if the
            weights, or those of the head, are new.
        expects: `mean` and `std` of the images that its initial weights were trained on, if they were.
        tokenizer: name of the Hugging Face tokenizer that its initial weights were trained with, if they were.
        prompt_end: the token that ends a prompt, of a language model whose encoder reads prompts.
    """

    feature_layer: str
    stages: tuple[str, ...] = ()
    preactivations: tuple[str, ...] = ()
    token_grid: TokenGrid | None = None
    pooled_layer: str = ""
    head_layers: tuple[str, ...] = ()
    inner: ClassVar[str] = ""
    is_trained: bool = False
    embeds: bool = False
    ranks: bool = False
    is_comparable: bool = True
    kept_blocks: tuple[int, ...] = ()
    trained_if: str = ""
    class_names: tuple[str, ...] | None = None
    expects: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    tokenizer: str | None = None
    prompt_end: int | None = None

    @classmethod
    def tokenizer_from(cls, options: Mapping[str, Any]) -> str | None:  # noqa: ARG003
        """The Hugging Face tokenizer of texts for a net made with these options; None if its weights know no tokens."""
        return None


def image_shape(input_shape: Sequence[int]) -> Shape:
    """Return the shape (C, H, W) of images; raise BadInput if it is not one."""
    if len(input_shape) != 3:
        raise BadInput("input_shape", tuple(input_shape), "(C, H, W), images")
    channels, height, width = input_shape
    return channels, height, width


def check_text_shape(input_shape: Sequence[int]) -> None:
    """Raise BadInput unless this is the shape (T,) of texts."""
    if len(input_shape) != 1:
        raise BadInput("input_shape", tuple(input_shape), "(T,), texts")


def check_widths(widths: Sequence[int], count: int) -> Sequence[int]:
    """Return the widths; raise BadInput if they aren't `count` numbers of channels."""
    if len(widths) != count or min(widths) < 1:
        raise BadInput("widths", list(widths), f"{count} numbers of channels, each at least 1")
    return widths


def check_sizes(**sizes: int) -> None:
    """Raise BadInput for the first size that is less than 1, or no whole number."""
    for name, size in sizes.items():
        if isinstance(size, float):
            raise BadInput(name, size, "a whole number")
        if size < 1:
            raise BadInput(name, size, "at least 1")


def norm_layer(norm: Norm) -> Callable[[int], nn.Module]:
    """Return a function from a number of channels to their norm; raise BadInput for an unknown name."""
    makers: dict[str, Callable[[int], nn.Module]] = {"batch": nn.BatchNorm2d, "group": group_norm}
    if norm not in makers:
        raise BadInput("norm", norm, " or ".join(makers))
    return makers[norm]


def group_norm(channels: int) -> nn.GroupNorm:
    """Return GroupNorm (Wu and He 2018) with as many equal groups as possible: at most 32, of 8 channels or more."""
    groups = range(max(1, min(32, channels // 8)), 0, -1)
    return nn.GroupNorm(next(n for n in groups if channels % n == 0), channels)


def conv_norm(in_channels: int, out_channels: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution without bias, padded to keep the size of maps at stride 1, and its BatchNorm."""
    convolution = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


class Mean(nn.Module):
    """The mean over positions: (B, C, H, W) -> (B, C)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def check_tokens(tokens: Tensor, starts: Tensor | None = None) -> None:
    """Raise BadInput unless tokens are whole numbers (B, T), and `starts` the places of their texts' first ones."""
    for name, x in (("tokens", tokens), ("starts", starts)):
        if x is not None and (x.dtype == torch.bool or x.dim() != 2 or not _is_whole(x)):
            kind = f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
            raise BadInput(name, kind, "whole numbers (B, T)")
    if starts is not None and starts.shape != tokens.shape:
        raise BadInput("starts", tuple(starts.shape), f"the shape of tokens, {tuple(tokens.shape)}")


def _is_whole(x: Tensor) -> bool:
    if not x.is_floating_point():
        return True
    return not torch.compiler.is_compiling() and (x.is_meta or torch.equal(x, x.trunc()))


def cast_inputs(net: nn.Module, inputs: Tensor) -> Tensor:
    """Cast floating-point inputs to the type of the net's parameters, if it has some."""
    dtype = next((p.dtype for p in net.parameters()), inputs.dtype)
    # A conversion to the same type would be captured in a graph, which then takes no other.
    return inputs.to(dtype) if inputs.is_floating_point() and inputs.dtype != dtype else inputs


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Inside, the net is in eval mode, without gradients; then its modules' modes are as before."""
    modes = [(module, module.training) for module in net.modules()]
    try:
        with torch.no_grad():
            net.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def unwrap_logits(net: nn.Module) -> nn.Module:
    """Let a net whose output is a tuple, a mapping or an object return the first entry, or "logits", from now on.

    Models of many libraries have such outputs. Tensors stay. Returns the net.
    """
    if not isinstance(net, Net) and _extract_logits not in net._forward_hooks.values():
        net.register_forward_hook(_extract_logits)
    return net


def _extract_logits(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
    return logits if isinstance(logits, Tensor) else output


def pipeline_stages(net: nn.Module, flag: str = "net") -> list[nn.Module]:
    """Return modules whose composition is the net's forward: its `pipeline_stages()`, or the parts of a sequence.

    BadInput if the net has no such method and is no sequence.
    """
    if (stages := getattr(net, "pipeline_stages", None)) is not None:
        modules: list[nn.Module] = stages()
        return modules
    if is_chain(net):
        return split_sequences(net.children())
    raise BadInput(flag, type(net).__name__, "a net that can be cut: with pipeline_stages(), or an nn.Sequential")


def split_sequences(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Split sequences among the modules into their members, and join in-place modules to their predecessors."""
    groups: list[list[nn.Module]] = []
    for module in _flatten(modules):
        if groups and getattr(module, "inplace", False):  # it would change a tensor that others may still read
            groups[-1].append(module)
        else:
            groups.append([module])
    return [group[0] if len(group) == 1 else nn.Sequential(*group) for group in groups]


def _flatten(modules: Iterable[nn.Module]) -> list[nn.Module]:
    # Subclasses of Sequential, such as a convolution with its norm, stay whole.
    return [part for m in modules for part in (_flatten(m) if type(m) is nn.Sequential else [m])]


def is_chain(module: nn.Module) -> bool:
    """Return whether a module is a plain sequence, which calls its members in order."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) > 0


def check_fits(
    net: nn.Module, example: Tensor, logits_shape: Sequence[int], flag: str = "net", trained: bool = True
) -> None:
    """Run a copy of the net on inputs (b, ...), b at least 2, in eval mode and, if `trained`, in training mode.

    BadInput if it fails, gives no logits (b, *logits_shape) or, if `trained`, logits without gradient.
    """
    name, shape = type(net).__name__, tuple(example.shape[1:])
    _check_parameters(net, flag)
    trial = copy.deepcopy(net)  # training changes BatchNorm's statistics
    for mode in (True, False) if trained else (False,):
        logits: Any = None
        try:
            with torch.set_grad_enabled(mode):
                logits = with_seed(0, partial(trial.train(mode), cast_inputs(trial, example)))
        except Exception as error:  # noqa: BLE001 - whatever a user's net does
            if isinstance(error, BadInput) and error.argument in inspect.signature(type(net)).parameters:
                raise BadInput(f"{flag}.{error.argument}", error.value, error.expected) from None
            expected = f"a net that takes inputs {shape}, as this data has them; it says: {reason(error)}"
            raise BadInput(flag, name, expected) from None
        if not isinstance(logits, Tensor) or tuple(logits.shape) != (len(example), *logits_shape):
            output = tuple(logits.shape[1:]) if isinstance(logits, Tensor) else type(logits).__name__
            raise BadInput(flag, name, f"a net that gives logits {tuple(logits_shape)} for an input; it gives {output}")
        if mode and not logits.requires_grad:
            frozen = not any(p.requires_grad for p in net.parameters())
            why = "all of its parameters are frozen" if frozen else "its logits have no gradient"
            raise BadInput(flag, name, f"a net that can be trained; {why}")


def _check_parameters(net: nn.Module, flag: str) -> None:
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    if next(net.parameters(), None) is None:
        raise BadInput(flag, type(net).__name__, "a net with parameters; it has none")
    if lazy := [key for key, x in state.items() if nn.parameter.is_lazy(x)]:
        expected = f"a net whose first weights are made with it, from the seed; {lazy[0]} is of a lazy module"
        raise BadInput(flag, type(net).__name__, expected)


def check_same_start(net: nn.Module, again: nn.Module, flag: str = "net") -> None:
    """Raise BadInput if two nets made with one seed differ in initial weights, with the first that does."""
    first, second = net.state_dict(), again.state_dict()
    for key, x in first.items():
        if not isinstance(x, Tensor) or nn.parameter.is_lazy(x):
            continue
        if x.shape != second[key].shape or not x.allclose(second[key], 0, 0, equal_nan=True):
            sources = "torch's, numpy's and Python's global random numbers"
            fault = f"two made with one seed differ in {key}"
            raise BadInput(flag, type(net).__name__, f"a net whose first weights come from {sources} alone; {fault}")
