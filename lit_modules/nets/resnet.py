"""Residual nets for small images (He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2)."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from apprentice.errors import BadInput
from lit_modules.nets.base import Mean, Net, Norm, Shape, check_widths, image_shape, norm_layer

Normed = Callable[[int], nn.Module]
Shortcut = Literal["pad", "conv"]


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, which where the shape changes is one of two.

    "pad" has no parameters (option A): strided, padded with zero channels. "conv" is a 1 x 1 convolution with its norm
    (option B).
    """

    def __init__(
        self, in_channels: int, out_channels: int, stride: int, normed: Normed, shortcut: Shortcut = "pad"
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = normed(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = normed(out_channels)
        self.relu = nn.ReLU()
        self.stride, self.extra_channels = stride, out_channels - in_channels
        self.shortcut: nn.Module | None = None
        if shortcut == "conv" and (stride > 1 or self.extra_channels):
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), normed(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, in, H, W) -> (B, out, H / stride, W / stride)."""
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.shortcut is not None:
            shortcut = self.shortcut(x)
        else:
            shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra_channels))
        output: Tensor = self.relu(y + shortcut)
        return output


class ResNet(Net):
    """CIFAR ResNet of 6n + 2 layers: a stem and three stages; ResNet-20 has 269,722 parameters.

    "resnet8x4" and "resnet32x4" of distillation papers have the widths 32, 64, 128, 256; all nets of their tables have
    shortcuts of convolutions.

    Args:
        depth: 8, 20, 32, 44, 56, 110: any 6n + 2.
        norm: BatchNorm, as in the paper, or GroupNorm.
        widths: channels of the stem and of each stage, which grow unless `shortcut` is conv.
        shortcut: where a block changes the shape: padded with zeros, as in the paper, or a 1 x 1 convolution.
    """

    feature_layer = "stage3"
    stages = ("stage1", "stage2", "stage3")
    pooled_layer = "head<"

    def __init__(
        self, depth: int = 20, input_shape: Shape = (3, 32, 32), num_classes: int = 10, norm: Norm = "batch",
        widths: tuple[int, int, int, int] = (16, 16, 32, 64), shortcut: Shortcut = "pad",
    ) -> None:  # fmt: skip
        super().__init__()
        normed = norm_layer(norm)
        blocks, rest = divmod(depth - 2, 6)
        if blocks < 1 or rest:
            raise BadInput("depth", depth, "6n + 2, as 8, 20, 32, 56 or 110")
        stem, first, second, third = check_widths(widths, 4)
        if shortcut == "pad" and sorted(widths) != list(widths):
            raise BadInput("widths", list(widths), "them to grow, or shortcut conv")
        self.stem = nn.Sequential(
            nn.Conv2d(image_shape(input_shape)[0], stem, 3, padding=1, bias=False), normed(stem), nn.ReLU()
        )
        channels, stages = stem, []
        for width, stride in ((first, 1), (second, 2), (third, 2)):
            others = (Block(width, width, 1, normed) for _ in range(blocks - 1))
            stages.append(nn.Sequential(Block(channels, width, stride, normed, shortcut), *others))
            channels = width
        self.stage1, self.stage2, self.stage3 = stages
        self.preactivations = tuple(f"{stage}.{blocks - 1}.relu<" for stage in self.stages)
        self.head = nn.Linear(third, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, C, H, W)."""
        x = self.stage3(self.stage2(self.stage1(self.stem(images))))  # (B, widths[3], H / 4, W / 4)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def pipeline_stages(self) -> list[nn.Module]:
        return [self.stem, *self.stage1, *self.stage2, *self.stage3, nn.Sequential(Mean(), self.head)]
