"""MobileNetV2 for small images (Sandler et al. 2018), as distillation papers have it."""

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Mean, Net, Shape, conv_norm, image_shape, split_sequences

BLOCKS = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
LAST = 1280


class _Residual(nn.Module):
    """Expands channels (1 x 1), convolves each (3 x 3), projects back (1 x 1); adds the input if shapes agree."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expand: int) -> None:
        super().__init__()
        inner = in_channels * expand
        self.layers = nn.Sequential(
            *conv_norm(in_channels, inner, 1), nn.ReLU(), *conv_norm(inner, inner, 3, stride, inner), nn.ReLU(),
            *conv_norm(inner, out_channels, 1),
        )  # fmt: skip
        self.adds = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H / stride, W / stride)."""
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


class MobileNetV2(Net):
    """MobileNetV2 whose maps of 32 x 32 images end at 2 x 2; half as wide it has 812,836 parameters for 100 classes.

    A block ends in a linear layer: there is no ReLU, and `preactivations` are the stages themselves.

    Args:
        width: factor of the numbers of channels, from 1/16 to 16.
    """

    feature_layer = "blocks.6"
    stages = ("blocks.1", "blocks.2", "blocks.4", "blocks.6")
    preactivations = stages
    pooled_layer = "head<"

    def __init__(self, width: float = 0.5, input_shape: Shape = (3, 32, 32), num_classes: int = 10) -> None:
        super().__init__()
        if not 1 / 16 <= width <= 16:
            raise BadInput("width", width, "1/16 or more, at most 16")
        channels, last = int(32 * width), max(LAST, int(LAST * width))
        self.stem = nn.Sequential(*conv_norm(image_shape(input_shape)[0], channels, 3, stride=2), nn.ReLU())
        self.blocks = nn.Sequential()
        for expand, out_channels, count, stride in BLOCKS:
            scaled = int(out_channels * width)
            first = _Residual(channels, scaled, stride, expand)
            self.blocks.append(nn.Sequential(first, *(_Residual(scaled, scaled, 1, expand) for _ in range(count - 1))))
            channels = scaled
        self.last = nn.Sequential(*conv_norm(channels, last, 1), nn.ReLU())
        self.head = nn.Linear(last, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        logits: Tensor = self.head(self.last(self.blocks(self.stem(images))).mean((2, 3)))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.stem, *split_sequences(self.blocks), nn.Sequential(self.last, Mean(), self.head)]
