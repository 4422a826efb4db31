"""Image classifiers of timm by name (R. Wightman, "PyTorch Image Models"), an optional dependency."""

import difflib
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from apprentice.errors import BadInput, first_line
from apprentice.extras import need
from lit_modules.nets.base import Net, Shape, image_shape
from lit_modules.nets.tokens import TokenGrid
from lit_modules.nets.weights import load_backbone, read_weights


class Timm(Net):
    """A classifier of timm, for images of any size and number of channels that it supports.

    `stages` are the layers that timm's feature extractor reads, if the model names them; `token_grid` is that of its
    patch embedding.

    Args:
        name: one of `timm.list_models()`, such as resnet18 or vit_tiny_patch16_224.
        pretrained: start with timm's weights, downloaded once; a head of another size stays new.
        weights: a file of such weights, in place of the download.

    Raises:
        Missing: timm is not installed.
        BadInput: no such model, or it can't be made for these images; weights that can't be had or don't fit.
    """

    inner = "model"
    untrained = MappingProxyType({"pretrained": False, "weights": None})

    def __init__(
        self, name: str = "resnet18", input_shape: Shape = (3, 32, 32), num_classes: int = 10,
        pretrained: bool = False, weights: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        need("timm", "timm")
        import timm

        if not timm.is_model(name):
            near = difflib.get_close_matches(name, timm.list_models(), 5, 0.4)
            raise BadInput("name", name, f"a model of timm, as {', '.join(near or ['resnet18'])}")
        channels, height, width = image_shape(input_shape)
        options: dict[str, Any] = {"pretrained": pretrained, "num_classes": num_classes, "in_chans": channels}
        try:
            try:
                self.model: nn.Module = timm.create_model(name, img_size=(height, width), **options)
            except TypeError:  # a net that takes any size
                self.model = timm.create_model(name, **options)
        except Exception as error:  # noqa: BLE001 - a download that fails raises what its library does
            flag, value = ("pretrained", True) if pretrained else ("name", name)
            expected = f"a model that can be made for {tuple(input_shape)} images; it says: {first_line(error)}"
            raise BadInput(flag, value, expected) from None
        config: Any = self.model.pretrained_cfg
        head = config["classifier"]
        if weights is not None:
            if not Path(weights).exists():
                raise BadInput("weights", weights, "a file of weights; there is none")
            has_head = load_backbone(self.model, read_weights(weights, "weights"), head, weights)
            self.class_names = () if has_head else None
        elif pretrained and num_classes == config["num_classes"]:
            self.class_names = _class_names(timm.data, self.model)
        if pretrained:
            self.expects = {key: tuple(config[key]) for key in ("mean", "std")}
        self.pooled_layer = f"model.{head}<"
        self.stages = tuple(f"model.{stage['module']}" for stage in getattr(self.model, "feature_info", None) or ())
        self.feature_layer = self.stages[-1] if self.stages else ""
        self.token_grid = _token_grid(self.model)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        logits: Tensor = self.model(images)
        return logits


def _token_grid(model: nn.Module) -> TokenGrid | None:
    """Return where the tokens stand, as the model's patch embedding and its count of other tokens say."""
    sizes = [getattr(module, "grid_size", None) for module in model.modules()]
    rows, columns = next((size for size in sizes if isinstance(size, tuple) and len(size) == 2), (0, 0))
    channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    before: Any = getattr(model, "num_prefix_tokens", 0)
    return TokenGrid(rows, columns, before, channels_last) if rows or channels_last else None


def _class_names(data: Any, model: Any) -> tuple[str, ...]:
    """Return WordNet's numbers and names of the ImageNet classes that the weights know; () if they know others."""
    subset = data.infer_imagenet_subset(model)
    if subset is None:
        return tuple(model.pretrained_cfg.get("label_names") or ())
    info = data.ImageNetInfo(subset)
    return tuple(map(", ".join, zip(info.label_names(), info.label_descriptions(), strict=True)))
