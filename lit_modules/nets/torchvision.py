"""Any of torchvision's classification models, with its head resized, as a net of the suite."""

import difflib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torchvision import models

from apprentice.errors import BadInput
from lit_modules.nets.base import Net, of_images
from lit_modules.nets.group_norm import Norm, norm_layer
from lit_modules.nets.stages import cuttable
from lit_modules.nets.tracing import chain

SIZES = (32, 48, 64, 75, 96, 128, 160, 192, 224, 256, 299)
WITH_AUXILIARY = {"googlenet", "inception_v3"}


class Torchvision(Net):
    """A torchvision classification model by name, from random weights; grey images are repeated to three channels.

    The feature layer is the last part of the model that still gives maps (B, C, H, W).

    Args:
        name: as `torchvision.models.list_models` gives it: resnet18, mobilenet_v2, ...
        input_shape: (C, H, W), C 1 or 3.
        num_classes: number of logits.
        norm: over the batch where the model has that, or in its place over groups of channels of each image.

    Raises:
        BadInput: no such model, or it can't take images of this size, gives no logits (B, classes) or has no such norm.
    """

    unused_weights = ("model.aux1.", "model.aux2.", "model.AuxLogits.")  # in torchvision's files: heads for training

    def __init__(
        self,
        name: str = "resnet18",
        input_shape: tuple[int, int, int] = (3, 32, 32),
        num_classes: int = 10,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        known = models.list_models(module=models)
        if name not in known:
            near = difflib.get_close_matches(name, known, 5, 0.4)
            raise BadInput("name", name, f"a classification model of torchvision, as {', '.join(near or known[:5])}")
        if of_images(input_shape)[0] not in {1, 3}:
            raise BadInput("name", name, f"images of 1 or 3 channels, not {input_shape[0]}")
        self.name, self.input_shape, self.num_classes = name, tuple(input_shape), num_classes
        self.norm_options = self._norm_options(norm)
        self.model = self._build(input_shape[-1])
        fault = self._fault(self.model, input_shape[1:])
        if fault:
            raise BadInput(
                "name", name, f"a model that takes {input_shape[1]} x {input_shape[2]} images; {self._advice(fault)}"
            )
        self.feature_layer = self._last_map()

    def _build(self, size: int) -> nn.Module:
        builder = models.get_model_builder(self.name)
        # Some heads are dropped in training's auxiliary outputs, some models fix the image size when they are built.
        options: dict[str, Any] = {"aux_logits": False, "init_weights": True} if self.name in WITH_AUXILIARY else {}
        if "image_size" in inspect.signature(builder).parameters or self.name.startswith("vit_"):
            options["image_size"] = size
        return builder(weights=None, num_classes=self.num_classes, **options, **self.norm_options)

    def _norm_options(self, norm: Norm) -> dict[str, Any]:
        """What the model's builder is told of the norm.

        Raises:
            BadInput: the model has no BatchNorm, or none that can be chosen.
        """
        if norm == "batch":
            return {}
        options = {"norm_layer": norm_layer(norm)}
        builder = models.get_model_builder(self.name)
        try:
            with torch.device("meta"):
                builder(weights=None, **options)
                batch = any(isinstance(m, nn.BatchNorm2d) for m in builder(weights=None).modules())
        except TypeError:  # it takes no norm_layer
            batch = False
        if not batch:
            raise BadInput("norm", norm, f"batch for {self.name}; others, as resnet50, have BatchNorm as an option")
        return options

    def _fault(self, model: nn.Module, size: tuple[int, ...]) -> str:
        """What keeps the model from giving logits for two images of this size, or nothing."""
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                logits = model.eval()(torch.zeros(2, 3, *size))
                model.train()
        except (RuntimeError, ValueError, AssertionError) as error:
            return str(error).split("\n")[0]
        if not isinstance(logits, Tensor) or logits.shape != (2, self.num_classes):
            return f"it gives no logits (2, {self.num_classes})"
        return ""

    def _advice(self, fault: str) -> str:
        for size in SIZES:
            if size >= min(self.input_shape[1:]):
                try:
                    if not self._fault(self._build(size), (size, size)):
                        return f"the smallest that {self.name} takes is about {size} x {size} ({fault})"
                except ValueError:
                    continue
        return fault

    def _last_map(self) -> str:
        shapes: dict[str, int] = {}
        handles = [
            m.register_forward_hook(
                lambda _m, _i, out, n=n: shapes.__setitem__(n, out.dim() if isinstance(out, Tensor) else 0)
            )
            for n, m in self.model.named_children()
        ]
        with torch.no_grad():
            self.model.eval()(torch.zeros(1, 3, *self.input_shape[1:]))
        self.model.train()
        for handle in handles:
            handle.remove()
        # What pools or classifies may still have four dimensions, but no map.
        maps = [
            n for n, dims in shapes.items() if dims == 4 and not any(w in n for w in ("pool", "classifier", "head"))
        ]
        return f"model.{maps[-1]}" if maps else ""

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1 or 3, H, W)."""
        return self.model(images.expand(-1, 3, -1, -1))

    def pipeline_stages(self) -> list[nn.Module]:
        """The model's children, those of its sequences one by one, with what it does between them.

        Raises:
            BadInput: the model is not a chain of its children.
        """
        weight = next(self.model.parameters())
        example = torch.rand(2, 3, *self.input_shape[1:], generator=torch.Generator().manual_seed(0))
        try:
            parts = chain(self.model, example.to(weight))
        except ValueError:
            like = "a model that is a chain of its children, as resnet50 or vgg11"
            raise BadInput("name", self.name, f"{like}: {self.name} can't be cut into pipeline stages") from None
        return cuttable([_ThreeChannels(), *parts])


class _ThreeChannels(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.expand(-1, 3, -1, -1)  # (B, 1 or 3, H, W) -> (B, 3, H, W)
