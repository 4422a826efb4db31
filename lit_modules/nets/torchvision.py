"""Any of torchvision's classification models, with a head of the right size."""

import copy
import difflib
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from apprentice.errors import BadInput, first_line
from lit_modules.nets.base import Net, Norm, Shape, image_shape, norm_layer, split_sequences
from lit_modules.nets.layers import observe
from lit_modules.nets.tokens import TokenGrid
from lit_modules.nets.weights import load_backbone, read_weights

WITH_AUXILIARY = {"googlenet", "inception_v3"}  # heads for training, and another normalisation inside
# Operations that models do between two children without a module.
GLUES: tuple[tuple[nn.Module, ...], ...] = ((), (nn.Flatten(1),), (nn.AdaptiveAvgPool2d(1), nn.Flatten(1)))
NOT_MAPS = ("pool", "classifier", "head")  # children whose output may have four dimensions without being maps


class Torchvision(Net):
    """A torchvision classification model by name; repeats grey images to three channels.

    The feature layer is the model's last child whose output is maps (B, C, H, W). The stages of a ViT are its blocks,
    whose tokens are a class token and the patches.

    Args:
        name: one of `torchvision.models.list_models`, such as resnet18 or mobilenet_v2.
        input_shape: (C, H, W), C 1 or 3.
        norm: BatchNorm, as the model has it, or GroupNorm in its place.
        weights: DEFAULT or another name of torchvision's weights, downloaded once, or a file of such weights; a head
            of another number of classes stays new. Default: random weights.
        transform_input: for GoogLeNet and Inception v3: whether to change torchvision's usual normalisation of images
            to mean and deviation 0.5, as torchvision's weights expect. Default: if `weights` is set.

    Raises:
        BadInput: no such model, or it can't take images of this size, gives no logits (B, classes) or has no such
            norm; no such weights, or they don't fit the model.
    """

    inner = "model"
    untrained = MappingProxyType({"weights": None})

    @classmethod
    def rebuild_arguments(cls, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments without weights, but with the input transform that these imply."""
        transforms = _transforms_input(arguments["name"], arguments["weights"], arguments.get("transform_input"))
        return {**super().rebuild_arguments(arguments), "transform_input": transforms or None}

    unused_weights = ("model.aux1.", "model.aux2.", "model.AuxLogits.")  # auxiliary heads in torchvision's files

    def __init__(
        self, name: str = "resnet18", input_shape: Shape = (3, 32, 32), num_classes: int = 10, norm: Norm = "batch",
        weights: str | None = None, transform_input: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        names = models.list_models(module=models)
        if name not in names:
            near = difflib.get_close_matches(name, names, 5, 0.4)
            raise BadInput("name", name, f"a classification model of torchvision, as {', '.join(near or names[:5])}")
        if image_shape(input_shape)[0] not in {1, 3}:
            raise BadInput("name", name, f"images of 1 or 3 channels, not {input_shape[0]}")
        self.name, self.input_shape, self.num_classes = name, tuple(input_shape), num_classes
        if transform_input is not None and name not in WITH_AUXILIARY:
            raise BadInput("transform_input", transform_input, f"{' or '.join(sorted(WITH_AUXILIARY))}, not {name}")
        self.model = self._build(norm, _transforms_input(name, weights, transform_input))
        self._name_layers()
        if weights is not None:
            self._load(weights)

    def _load(self, weights: str) -> None:
        known = models.get_model_weights(self.name).__members__
        if weights in known:
            try:
                state = known[weights].get_state_dict(progress=False, check_hash=True)
            except OSError as error:
                raise BadInput("weights", weights, f"weights that can be downloaded ({error})") from None
            preprocessing = known[weights].transforms()
            self.expects = {"mean": tuple(preprocessing.mean), "std": tuple(preprocessing.std)}
        elif Path(weights).exists():
            state = read_weights(weights, "weights")
        else:
            raise BadInput("weights", weights, f"{', '.join(known)}, or a file of weights")
        head, *unused = (name.removeprefix("model.") for name in (self.pooled_layer, *self.unused_weights))
        if load_backbone(self.model, state, head.removesuffix("<"), weights, unused):
            self.class_names = tuple(known[weights].meta["categories"]) if weights in known else ()

    def _build(self, norm: Norm, transform_input: bool) -> nn.Module:
        builder: Callable[..., nn.Module] = models.get_model_builder(self.name)
        options: dict[str, Any] = {"weights": None, "num_classes": self.num_classes}
        if self.name in WITH_AUXILIARY:
            options |= {"aux_logits": False, "init_weights": True, "transform_input": transform_input}
        if "image_size" in inspect.signature(builder).parameters or self.name.startswith("vit_"):
            options["image_size"] = self.input_shape[-1]
        if norm == "batch":
            return builder(**options)
        with torch.device("meta"):
            has_batch_norm = any(isinstance(m, nn.BatchNorm2d) for m in builder(weights=None).modules())
        with suppress(TypeError):  # it takes no norm_layer
            if has_batch_norm:
                return builder(**options, norm_layer=norm_layer(norm))
        raise BadInput("norm", norm, f"batch for {self.name}; others, as resnet50, have BatchNorm as an option")

    @torch.no_grad()
    def _name_layers(self) -> None:
        """Run the model once; set the names of the layers that objectives read. Raise BadInput if it can't run."""
        height, width = self.input_shape[1:]
        fits = f"a model that takes {height} x {width} images"
        try:
            layers = {name: module for name, module in self.model.named_modules() if name and name.count(".") < 2}
            with observe(layers) as outputs:
                logits = self.model.eval()(torch.zeros(2, 3, height, width))
        except (RuntimeError, ValueError, AssertionError) as error:
            raise BadInput("name", self.name, f"{fits}; it says: {first_line(error)}") from None
        if not isinstance(logits, Tensor) or logits.shape != (2, self.num_classes):
            raise BadInput("name", self.name, f"{fits}; it gives no logits (2, {self.num_classes})")
        self.model.train()
        sizes = {name: x.shape[2:] for name, x in outputs.items() if isinstance(x, Tensor) and x.dim() == 4}
        children = [name for name in sizes if "." not in name and not any(word in name for word in NOT_MAPS)]
        self.feature_layer = f"model.{children[-1]}" if children else ""
        self.pooled_layer = f"model.{[name for name in outputs if '.' not in name][-1]}<"
        # Children that consist of blocks, as layer1 to layer4; of fewer than three, the blocks of the last one.
        blocks = [name for name in children if any(True for _ in layers[name].children())]
        if len(blocks) < 3:
            blocks = [name for name in sizes if name.startswith(f"{blocks[-1]}.")] if blocks else []
        self.stages = tuple({sizes[name]: f"model.{name}" for name in blocks}.values())
        if isinstance(self.model, models.VisionTransformer):
            side = self.model.image_size // self.model.patch_size
            self.token_grid = TokenGrid(side, side, before=1)
            blocks = [name for name, _ in self.model.encoder.layers.named_children()]
            self.stages = tuple(f"model.encoder.layers.{name}" for name in blocks)
        lasts = [list(dict(self.get_submodule(path).named_children()).items())[-1:] for path in self.stages]
        if all(last and isinstance(getattr(last[0][1], "relu", None), nn.ReLU) for last in lasts):
            names = zip(self.stages, lasts, strict=True)
            self.preactivations = tuple(f"{path}.{last[0][0]}.relu<" for path, last in names)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1 or 3, H, W)."""
        logits: Tensor = self.model(images.expand(-1, 3, -1, -1))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        """The model's children, sequences split, and the operations between them; BadInput if it does others."""
        example = torch.rand(2, 3, *self.input_shape[1:], generator=torch.Generator().manual_seed(0))
        try:
            parts = split_chain(self.model, example.to(next(self.model.parameters())))
        except ValueError:
            like = "a model that is a chain of its children, as resnet50 or vgg11"
            raise BadInput("name", self.name, f"{like}: {self.name} can't be cut into pipeline stages") from None
        return split_sequences([_ThreeChannels(), *parts])


def _transforms_input(name: str, weights: str | None, transform_input: bool | None) -> bool:
    """Return whether a model normalises its input anew: by default if it has weights, as in torchvision's builders."""
    return name in WITH_AUXILIARY and (weights is not None if transform_input is None else transform_input)


class _ThreeChannels(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)  # (B, 1 or 3, H, W) -> (B, 3, H, W)


@torch.no_grad()
def split_chain(model: nn.Module, example: Tensor) -> list[nn.Module]:
    """Return the model's children in order, with modules for the operations between them; ValueError if it is no chain.

    Their composition equals the model's forward, bit for bit, in eval mode and for the example's inputs.
    """
    names, tensors = _trace_children(copy.deepcopy(model).eval(), example)
    if len(set(names)) < len(names):
        raise ValueError("a child is called twice")
    parts = list(_find_glue(*tensors[0]))
    for name, junction in zip(names, tensors[1:], strict=True):
        parts += [model.get_submodule(name), *_find_glue(*junction)]
    return parts


def _trace_children(model: nn.Module, example: Tensor) -> tuple[list[str], list[tuple[Tensor, Tensor]]]:
    """Return the children's names in call order, and for each gap around them the tensors before and after it."""
    names: list[str] = []
    outputs, inputs = [example], []

    def enter(_module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) != 1 or not isinstance(args[0], Tensor):
            raise ValueError("a child takes more than one tensor")
        inputs.append(args[0].clone())  # a child may work in place

    def leave(name: str, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor):
            raise ValueError("a child gives more than one tensor")
        names.append(name)
        outputs.append(output.clone())

    for name, child in model.named_children():
        child.register_forward_pre_hook(enter)
        child.register_forward_hook(partial(leave, name))
    inputs.append(model(example.clone()))
    return names, list(zip(outputs, inputs, strict=True))


def _find_glue(before: Tensor, after: Tensor) -> tuple[nn.Module, ...]:
    """Return the modules that turn one tensor into the other."""
    for glue in GLUES if before.dim() == 4 else GLUES[:1]:
        if torch.equal(nn.Sequential(*glue)(before), after):
            return glue
    raise ValueError(f"an unknown operation between {tuple(before.shape)} and {tuple(after.shape)}")
