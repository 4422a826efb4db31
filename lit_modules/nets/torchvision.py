"""Any of torchvision's classification models, with its head resized, as a net of the suite."""

import difflib
import inspect

import torch
from torch import Tensor, nn
from torchvision import models

from apprentice.errors import BadInput
from lit_modules.nets.base import Net

SIZES = (32, 48, 64, 75, 96, 128, 160, 192, 224, 256, 299)


class Torchvision(Net):
    """A torchvision classification model by name, from random weights; grey images are repeated to three channels.

    The feature layer is the last part of the model that still gives maps (B, C, H, W).

    Args:
        name: as `torchvision.models.list_models` gives it: resnet18, mobilenet_v2, ...
        input_shape: (C, H, W), C 1 or 3.
        num_classes: number of logits.

    Raises:
        BadInput: no such model, or it can't take images of this size or gives no logits (B, classes).
    """

    def __init__(
        self, name: str = "resnet18", input_shape: tuple[int, int, int] = (3, 32, 32), num_classes: int = 10
    ) -> None:
        super().__init__()
        known = models.list_models(module=models)
        if name not in known:
            near = difflib.get_close_matches(name, known, 5, 0.4)
            raise BadInput("name", name, f"a classification model of torchvision, as {', '.join(near or known[:5])}")
        if input_shape[0] not in {1, 3}:
            raise BadInput("name", name, f"images of 1 or 3 channels, not {input_shape[0]}")
        self.name, self.input_shape, self.num_classes = name, tuple(input_shape), num_classes
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
        options: dict[str, int] = (
            {"aux_logits": False, "init_weights": True} if self.name in {"googlenet", "inception_v3"} else {}
        )
        if "image_size" in inspect.signature(builder).parameters or self.name.startswith("vit_"):
            options["image_size"] = size
        return builder(weights=None, num_classes=self.num_classes, **options)

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
