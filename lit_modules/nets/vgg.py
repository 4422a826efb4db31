"""VGG with BatchNorm for small images (Simonyan and Zisserman 2015), as distillation papers have it."""

from typing import Literal

from torch import Tensor, nn

from apprentice.errors import BadInput
from lit_modules.nets.base import Mean, Net, Shape, image_shape, split_sequences

LAYERS = {  # convolutions of the stem and of each stage
    8: (1, 1, 1, 1, 1), 11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4),
}  # fmt: skip
WIDTHS = (64, 128, 256, 512, 512)


class VGG(Net):
    """A stem and four stages of 3 x 3 convolutions with BatchNorm and ReLU, pooled, and one linear layer.

    VGG-13 has 9,462,180 parameters for 3 x 32 x 32 images and a hundred classes, VGG-8 3,965,028. As in the code of
    published tables, the first maps belong to the stem and are no stage. Maps are halved after the stem, after the
    first two stages, after the third for images of 64 pixels or more, and averaged after the last.

    Args:
        depth: 8, 11, 13, 16 or 19.
        input_shape: (C, H, W), of 8 x 8 pixels or more.
    """

    feature_layer = "stage4"
    stages = ("stage1", "stage2", "stage3", "stage4")
    pooled_layer = "head<"

    def __init__(
        self, depth: Literal[8, 11, 13, 16, 19] = 8, input_shape: Shape = (3, 32, 32), num_classes: int = 10
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape)
        if min(height, width) < 8:
            raise BadInput("input_shape", tuple(input_shape), "at least 8 x 8 pixels")
        counts = LAYERS[depth]
        for name, count, out_channels in zip(("stem", *self.stages), counts, WIDTHS, strict=True):
            members: list[nn.Module] = []
            for _ in range(count):
                members += [nn.Conv2d(channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels), nn.ReLU()]
                channels = out_channels
            self.add_module(name, nn.Sequential(*members))
        self.preactivations = tuple(
            f"{stage}.{3 * count - 1}<" for stage, count in zip(self.stages, counts[1:], strict=True)
        )
        self.pool, self.mean, self.head = nn.MaxPool2d(2), Mean(), nn.Linear(channels, num_classes)
        self.pooled_stages = 4 if min(height, width) >= 64 else 3
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.normal_(self.head.weight, std=0.01)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def _layers(self) -> list[nn.Module]:
        parts: list[nn.Module] = []
        for number, name in enumerate(("stem", *self.stages)):
            parts += [self.get_submodule(name), *[self.pool] * (number < self.pooled_stages)]
        return [*parts, self.mean, self.head]

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        x = images
        for layer in self._layers():
            x = layer(x)
        return x

    def pipeline_stages(self) -> list[nn.Module]:
        return split_sequences(self._layers())
